"""A step's input without data: what the shapes, and so memory and time, depend on."""

from __future__ import annotations

import torch

from triweave.config.validate import ResolvedRun
from triweave.layers.attention import Documents
from triweave.llama import StageInput
from triweave.training.step import Batch

DOCUMENTS = 4
"""Documents of a packed sequence, all of one length."""


def make_batch(resolved: ResolvedRun, device: torch.device) -> Batch:
    """Random tokens for every micro-batch of a step; packed sequences hold several documents."""
    run, layout = resolved.run, resolved.layout
    seq, batch = run.data.seq_len, layout.micro_batch
    documents = DOCUMENTS if run.data.packing else 1
    length = -(-seq // documents)
    inputs, targets = [], []
    for _ in range(resolved.num_micro_batches):
        tokens = torch.randint(0, resolved.spec.vocab_size, (seq, batch), device=device)
        place = torch.arange(seq, device=device).unsqueeze(1).expand(seq, batch)
        packed = None
        if documents > 1:
            starts = [row * seq + start for row in range(batch) for start in range(0, seq, length)]
            edges = torch.tensor([*starts, batch * seq], dtype=torch.int32, device=device)
            packed = Documents((place // length).contiguous(), edges, length)
        inputs.append(StageInput(tokens, (place % length).contiguous(), packed))
        targets.append(torch.roll(tokens, -1, 0))
    return Batch(inputs, targets, run.train.global_batch * seq)
