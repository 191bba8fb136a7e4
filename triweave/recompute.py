"""Recompute: keep less for backward and compute it again there.

Two ways, chosen by what is recomputed. A cheap product that one matrix product keeps as its input (a norm's
output, SwiGLU's product) is computed again just before that product's backward: `recomputing`. A whole block
(attention, MLP, layer) is run again from its input: `checkpointed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@contextmanager
def recomputing(function: Callable[[Tensor], Tensor], x: Tensor, *, enabled: bool) -> Iterator[None]:
    """Inside, whatever is kept for backward is kept as `function(x)` still to be computed.

    Use it around one operation whose only saved tensor is `function(x)`; `x` itself must be kept anyway (by
    `function`'s own backward), so nothing is added and the size of `function(x)` is saved.
    """
    if not enabled:
        yield
        return
    source = x.detach()

    def forget(_: Tensor) -> Tensor:
        return source

    def recompute(kept: Tensor) -> Tensor:
        with torch.no_grad():
            return function(kept)

    with torch.autograd.graph.saved_tensors_hooks(forget, recompute):
        yield


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor, *, enabled: bool) -> Tensor:
    """`block(x)`, keeping only `x` for backward and running `block` again there (Chen et al. 1604.06174)."""
    if not enabled:
        return block(x)
    # Llama has no dropout: there is no random state to replay.
    result: Tensor = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return result


def checkpointed_after(
    function: Callable[[Tensor], Tensor], x: Tensor, value: Tensor, block: Callable[[Tensor], Tensor], *, enabled: bool
) -> Tensor:
    """`block(value)`, where `value` is `function(x)`: keeps neither, but `x`, and runs both again in backward."""
    if not enabled:
        return block(value)
    computed = [value]

    def run(kept: Tensor) -> Tensor:
        # The first time the value is there, and through it the gradient goes on to `x`.
        return block(computed.pop() if computed else function(kept))

    return checkpointed(run, x, enabled=True)
