"""Messages that were sent and wait: the host launches ahead of the GPU, and keeps what it sent until the GPU has it."""

from __future__ import annotations

from triweave.layout import Layout

LAUNCH_QUEUE = 1024
"""Kernels that CUDA lets the host launch ahead of the GPU before a launch blocks."""
_FORWARD, _BACKWARD = 11, 24
"""Kernels of one layer: its products, norms, rotary embedding, attention, SwiGLU and sums."""
_FORWARD_COPIES, _BACKWARD_COPIES = 8, 12
"""Copies and sums of one layer for each tensor-parallel rank, where activations are split along the sequence."""
_BESIDE_GRAPHS = 15
"""Launches of a micro-batch beside its layers where these are graphs: cosines and sines, and copies into slots."""


def message_buffers(layout: Layout, rank: int, num_micro_batches: int, *, runs_ahead: bool, graphs: bool) -> int:
    """Messages that a rank of a pipeline has memory for while an action computes.

    Args:
        layout: the grid.
        rank: the pipeline rank.
        num_micro_batches: of a step.
        runs_ahead: whether the host runs ahead of the GPU, which messages that were sent then wait for.
        graphs: whether layers are CUDA graphs.
    """
    alone = layout.vpp == 1
    if graphs:
        # The next one, and the gradient that is read; what is sent ahead lies in a slot.
        received = 1 if rank == layout.pp - 1 and alone else 2
        return received + gradients_waiting(layout, rank, num_micro_batches)
    # The next one is received, and those that were sent wait for the GPU.
    neighbours = 1 if rank in (0, layout.pp - 1) and alone else 2
    return 1 + neighbours + (messages_waiting(layout, rank, num_micro_batches) if runs_ahead else 0)


def messages_waiting(layout: Layout, rank: int, num_micro_batches: int) -> int:
    """Messages of pipeline rank `rank` that wait beside the last one in each direction.

    Few in a stage of many layers: as many as the actions whose kernels fill the launch queue.
    """
    layers = max(layout.layers[stage] for stage in layout.stages_of(rank))
    tp = layout.tp if layout.uses_sequence_parallel else 0
    forward = max(1, layers * (_FORWARD + _FORWARD_COPIES * tp))
    backward = max(1, layers * (_BACKWARD + _BACKWARD_COPIES * tp))
    if layout.schedule == "gpipe":
        # All forwards come first, and most is held after the last of them.
        return min(num_micro_batches - 1, LAUNCH_QUEUE // forward) if rank < layout.pp - 1 else 0
    neighbours = 1 if rank in (0, layout.pp - 1) and layout.vpp == 1 else 2
    return neighbours * min(num_micro_batches - 1, LAUNCH_QUEUE // (forward + backward))


def gradients_waiting(layout: Layout, rank: int, num_micro_batches: int) -> int:
    """Messages that were sent back and wait where layers are graphs, each one launch; those sent ahead lie in slots."""
    stages = [stage for stage in layout.stages_of(rank) if stage]
    if not stages or layout.schedule == "gpipe":
        # As many inputs of stages are gone when gradients have been sent.
        return 0
    passes = 3 if layout.schedule == "zero-bubble" else 2
    launches = sum(passes * layout.layers[stage] + _BESIDE_GRAPHS for stage in layout.stages_of(rank))
    return len(stages) * min(num_micro_batches - 1, max(1, LAUNCH_QUEUE // launches))
