"""A step's input without data: what the shapes, and so memory and time, depend on."""

from __future__ import annotations

import torch

from triweave.config.validate import ResolvedRun
from triweave.layers.documents import Documents
from triweave.llama import StageInput
from triweave.parameters import vocab_rows
from triweave.training.batches import share_of
from triweave.training.step import Batch

DOCUMENTS = 4
"""Documents of a packed sequence, all of one length."""


def make_batch(resolved: ResolvedRun, device: torch.device, tp_rank: int = 0, cp_rank: int = 0) -> Batch:
    """Random tokens for every micro-batch of a step; packed sequences hold several documents.

    They are drawn from the words that rank `tp_rank` holds: nobody is there to look the others up, rows of zeros would
    stay zeros through all layers, and a norm's gradient there grows 300-fold a layer. Of each sequence a rank has the
    slices that are `cp_rank`'s.
    """
    run, layout = resolved.run, resolved.layout
    rows = vocab_rows(resolved.spec.vocab_size, layout.tp)
    first, stop = tp_rank * rows, min((tp_rank + 1) * rows, resolved.spec.vocab_size)
    seq, batch = run.data.seq_len, layout.micro_batch
    documents = DOCUMENTS if run.data.packing else 1
    length = -(-seq // documents)
    inputs, targets = [], []
    for _ in range(resolved.num_micro_batches):
        tokens = torch.randint(first, stop, (seq, batch))
        place = torch.arange(seq).unsqueeze(1).expand(seq, batch)
        packed = None
        if documents > 1:
            starts = [row * seq + start for row in range(batch) for start in range(0, seq, length)]
            edges = torch.tensor([*starts, batch * seq], dtype=torch.int32)
            packed = Documents((place // length).contiguous(), edges, length)
        whole = StageInput(tokens, (place % length).contiguous(), packed)
        mine, wanted = share_of(whole, torch.roll(tokens, -1, 0), layout, cp_rank)
        inputs.append(mine.to(device))
        targets.append(wanted.to(device))
    return Batch(inputs, targets, run.train.global_batch * seq)
