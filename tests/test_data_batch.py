"""The tensors of a micro-batch."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triweave.data.batch import PADDING_DOCUMENT, load_micro_batches, make_micro_batch
from triweave.data.dataset import Dataset, count_trained_tokens, open_dataset, write_dataset
from triweave.data.packing import one_each, pack
from triweave.data.sampler import sequence_ids
from triweave.layout import Coordinates, Layout, context_slices
from triweave.training.batches import share_of, stage_input

SEQ_LEN = 12


def write(folder: Path, lengths: list[int], *, packing: bool, seed: int = 0) -> Dataset:
    """Random examples of `lengths`; about half of their tokens trained."""
    random = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = random.integers(1, 1000, size=int(starts[-1]), dtype=np.int32)
    trained = random.random(int(starts[-1])) < 0.5
    trained[starts[:-1]] = False
    arranged = (pack if packing else one_each)(lengths, SEQ_LEN)
    write_dataset(folder, arranged, np.arange(len(lengths)), starts, tokens, trained)
    return open_dataset(folder, SEQ_LEN)


def naive_targets(dataset: Dataset) -> dict[int, list[tuple[int, int]]]:
    """Example: (token, target) at each of its positions, by the definition: the next token, if it is trained."""
    found = {}
    for document, example in enumerate(dataset.examples.tolist()):
        first, last = dataset.document_starts[document : document + 2].tolist()
        pairs = []
        for t in range(first, last):
            following = t + 1 < last and bool(dataset.trained[t + 1])
            pairs.append((int(dataset.tokens[t]), int(dataset.tokens[t + 1]) if following else -100))
        found[example] = pairs
    return found


def batch_targets(dataset: Dataset) -> dict[int, list[tuple[int, int]]]:
    """The same, read back from micro-batches of all sequences by their document ids."""
    batch = make_micro_batch(dataset, range(dataset.num_sequences))
    found = {}
    for column, number in enumerate(batch.ids):
        first = int(dataset.sequence_starts[number])
        for document in range(int(batch.documents[:, column].max()) + 1):
            rows = (batch.documents[:, column] == document).nonzero().flatten()
            pairs = zip(batch.tokens[rows, column].tolist(), batch.targets[rows, column].tolist(), strict=True)
            found[int(dataset.examples[first + document])] = list(pairs)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(2, SEQ_LEN), min_size=1, max_size=20))
def test_packed_targets_are_the_unpacked_ones(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    """Whatever shares a sequence with it, an example predicts the same tokens, none across its end."""
    folder = tmp_path_factory.mktemp("data")
    packed, unpacked = write(folder / "a", lengths, packing=True), write(folder / "b", lengths, packing=False)
    assert batch_targets(packed) == naive_targets(packed) == batch_targets(unpacked)


def test_positions_and_lengths_agree_with_the_documents(tmp_path: Path) -> None:
    """Positions restart in each document, and the cumulative lengths cut the sequences just there, padding included."""
    dataset = write(tmp_path / "a", [5, 7, 3, 12, 4], packing=True)
    batch = make_micro_batch(dataset, range(dataset.num_sequences))
    count = dataset.num_sequences
    assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == batch.documents.shape
    assert batch.tokens.shape == (SEQ_LEN, count)
    assert batch.cu_seqlens.dtype == torch.int32
    assert (batch.cu_seqlens[0], batch.cu_seqlens[-1]) == (0, SEQ_LEN * count)
    flat_positions, flat_documents = batch.positions.t().reshape(-1), batch.documents.t().reshape(-1)
    edges = batch.cu_seqlens.tolist()
    for first, last in pairwise(edges):
        assert flat_positions[first:last].tolist() == list(range(last - first))
        assert len(set(flat_documents[first:last].tolist())) == 1
        assert first // SEQ_LEN == (last - 1) // SEQ_LEN
    assert batch.max_seqlen == max(last - first for first, last in pairwise(edges))
    padding = batch.documents == PADDING_DOCUMENT
    assert int(padding.sum()) == SEQ_LEN * count - len(dataset.tokens)
    assert set(batch.targets[padding].tolist()) <= {-100}
    assert batch.num_trained == int((batch.targets != -100).sum()) == int(dataset.trained.sum())


def test_target_is_never_the_next_documents_first_token(tmp_path: Path) -> None:
    """A planted fault: training marks at a document's first token would leak, and this test would see it."""
    dataset = write(tmp_path / "a", [6, 6], packing=True)
    last = make_micro_batch(dataset, [0]).targets[5, 0]
    assert last == -100
    marked = np.array(dataset.trained)
    marked[6] = True
    leaky = Dataset(SEQ_LEN, dataset.tokens, marked, *(getattr(dataset, name) for name in Dataset.__slots__[3:]))
    assert make_micro_batch(leaky, [0]).targets[5, 0] == dataset.tokens[6]


def test_empty_sequence_is_all_padding(tmp_path: Path) -> None:
    """What fills up the last batch of an evaluation counts nothing."""
    dataset = write(tmp_path / "a", [12], packing=True)
    batch = make_micro_batch(dataset, [0, -1])
    assert set(batch.targets[:, 1].tolist()) == {-100}
    assert set(batch.documents[:, 1].tolist()) == {PADDING_DOCUMENT}
    assert batch.num_trained == make_micro_batch(dataset, [0]).num_trained
    assert batch.cu_seqlens.tolist() == [0, 12, 24]


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (2, 1), (1, 3), (3, 2), (6, 1)])
def test_step_is_the_same_on_every_layout(tmp_path: Path, dp: int, micro_batch: int) -> None:
    """Put side by side the ranks' micro-batches are one batch, and their trained tokens the divisor all know."""
    dataset = write(tmp_path / "a", [2 + n % 11 for n in range(60)], packing=True)
    layout = Layout(dp=dp, micro_batch=micro_batch, tp=2)
    ids = sequence_ids(1, 5, 6, dataset.num_sequences)
    parts = [
        batch
        for rank in range(dp)
        for batch in load_micro_batches(dataset, ids, layout, Coordinates(tp=0, cp=0, dp=rank, pp=0))
    ]
    whole = load_micro_batches(dataset, ids, Layout(micro_batch=6), Coordinates(0, 0, 0, 0))[0]
    for name in ("tokens", "targets", "positions", "documents"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name))
    assert sum(part.num_trained for part in parts) == count_trained_tokens(dataset, ids)
    other = load_micro_batches(dataset, ids, layout, Coordinates(tp=1, cp=0, dp=0, pp=0))
    assert torch.equal(other[0].tokens, parts[0].tokens)


@pytest.mark.parametrize("cp", [2, 3])
def test_context_parallel_ranks_share_a_sequence(tmp_path: Path, cp: int) -> None:
    """Put back in the order of the sequence, what the ranks have of tokens, targets and positions is the whole."""
    part = make_micro_batch(write(tmp_path / "a", [7, 5, 12], packing=True), [0, 1])
    whole = stage_input(part)
    shares = [share_of(whole, part.targets, Layout(cp=cp), rank) for rank in range(cp)]
    slices = sorted(
        (number, rank, place) for rank in range(cp) for place, number in enumerate(context_slices(rank, cp))
    )
    for values, theirs in (
        ([inputs.tokens for inputs, _ in shares], whole.tokens),
        ([inputs.positions for inputs, _ in shares], whole.positions),
        ([targets for _, targets in shares], part.targets),
    ):
        assert torch.equal(torch.cat([values[rank].chunk(2)[place] for _, rank, place in slices]), theirs)


@pytest.mark.parametrize("cp", [1, 2])
def test_inputs_move_whole(tmp_path: Path, cp: int) -> None:
    """Every tensor of a micro-batch goes to the device, those of its documents too."""
    part = make_micro_batch(write(tmp_path / "a", [7, 5, 12], packing=True), [0])
    inputs, _ = share_of(stage_input(part), part.targets, Layout(cp=cp), 0)
    found = set()

    def look(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.add(value.device.type)
        elif isinstance(value, tuple):
            for one in value:
                look(one)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                look(getattr(value, field.name))

    look(inputs)
    assert found == {"cpu"}
    found.clear()
    look(inputs.to(torch.device("meta")))
    assert found == {"meta"}
