"""From the prepared data to what one rank computes in a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from triweave.data.batch import MicroBatch, load_micro_batches
from triweave.data.dataset import Dataset, count_trained_tokens
from triweave.data.sampler import evaluation_batches, evaluation_ids, sequence_ids
from triweave.layers.documents import Documents, documents_in_context, own_slices
from triweave.layout import Layout
from triweave.llama import StageInput
from triweave.training.engine import Engine
from triweave.training.step import Batch


def training_batch(dataset: Dataset, engine: Engine, *, seed: int, step: int, global_batch: int) -> Batch:
    """This rank's part of step `step` (from 0): a function of the seed and the step, whatever the layout."""
    return batch_of(dataset, engine, sequence_ids(seed, step, global_batch, dataset.num_sequences))


def validation_batches(dataset: Dataset, *, global_batch: int, max_batches: int | None) -> list[Sequence[int]]:
    """The sequences of every batch of an evaluation, each sequence once."""
    count = evaluation_batches(global_batch, dataset.num_sequences)
    if max_batches is not None:
        count = min(count, max_batches)
    return [evaluation_ids(number, global_batch, dataset.num_sequences) for number in range(count)]


def batch_of(dataset: Dataset, engine: Engine, ids: Sequence[int]) -> Batch:
    """This rank's part of a global batch made of the sequences `ids`."""
    mine = load_micro_batches(dataset, ids, engine.layout, engine.groups.at)
    shares = [share_of(stage_input(part), part.targets, engine.layout, engine.groups.at.cp) for part in mine]
    device = engine.groups.device
    return Batch(
        inputs=[inputs.to(device) for inputs, _ in shares],
        targets=[targets.to(device, non_blocking=True) for _, targets in shares],
        trained_tokens=count_trained_tokens(dataset, ids),
    )


def share_of(inputs: StageInput, targets: Tensor, layout: Layout, cp_rank: int) -> tuple[StageInput, Tensor]:
    """A context-parallel rank's slices of a micro-batch of whole sequences, which is on the CPU.

    Args:
        inputs: of whole sequences.
        targets: `[seq, batch]`, likewise.
        layout: the grid.
        cp_rank: the rank's place on its context-parallel axis.

    Returns:
        Both with `seq/cp` rows: what was at the same place of the sequence is at the same row.
    """
    if layout.cp == 1:
        return inputs, targets
    documents = inputs.documents
    if isinstance(documents, Documents):
        documents = documents_in_context(documents, cp_rank, layout.cp)
    tokens, positions, targets = (
        own_slices(one, cp_rank, layout.cp) for one in (inputs.tokens, inputs.positions, targets)
    )
    return StageInput(tokens, positions, documents), targets


def stage_input(part: MicroBatch) -> StageInput:
    """What the model needs of a micro-batch; documents only where a sequence holds more than one.

    Padding follows the last document, so plain causal attention already keeps it out of sight.
    """
    documents = None
    if int(part.documents.max()) > 0:
        documents = Documents(part.documents, part.cu_seqlens, part.max_seqlen)
    return StageInput(part.tokens, part.positions, documents)
