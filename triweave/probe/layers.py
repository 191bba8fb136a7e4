"""Whole decoder layers: what the parts are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from triweave.groups import Group, alone
from triweave.layers.attention import choose_kernel
from triweave.layers.rotary import inverse_frequencies, make_rotation
from triweave.layers.tensor_parallel import TensorParallel
from triweave.llama import DecoderLayer
from triweave.planner.profile import LayerPoint
from triweave.probe.session import Session
from triweave.probe.shapes import LayerShape, layer_shapes
from triweave.transport.choose import choose_transport

SECONDS = 1.5
"""Of one layer after the other; the last half is what counts."""


def measure_layers(session: Session) -> tuple[LayerPoint, ...]:
    """On one rank alone, then over the first 2, 4, ... ranks, as training would cut them; the others wait meanwhile."""
    points = []
    for group in [alone(), *session.in_order()]:
        for shape in layer_shapes(session.small, group.size):
            points.append(_measure(session, group, shape))
            session.tell(f"layers, tp {group.size}", 0.0)
    return tuple(points)


def _measure(session: Session, group: Group, shape: LayerShape) -> LayerPoint:
    spec, tp = shape.spec, group.size
    slices = (shape.seq // tp, shape.batch, spec.hidden_size)
    transport = choose_transport("auto", group, tp > 1, session.device, 2 * prod(slices))
    ours = TensorParallel(group, tp > 1, chosen=transport)
    with torch.device("meta"):
        layer = DecoderLayer(spec, ours, choose_kernel("auto", session.device), ())
    layer.to(session.dtype).to_empty(device=session.device)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
    positions = torch.arange(shape.seq, device=session.device).unsqueeze(1).expand(-1, shape.batch)
    rotation = make_rotation(inverse_frequencies(spec).to(session.device), positions, session.dtype)
    x, upstream = session.random(*slices), session.random(*slices)

    def forward() -> Tensor:
        y: Tensor = layer(x.detach().requires_grad_(), rotation, None)
        return y

    def backward(y: Tensor) -> None:
        y.backward(upstream)

    gpu = _on_gpu(session, group, forward, backward)
    sizes = (spec.hidden_size, spec.intermediate_size, spec.num_attention_heads, spec.num_key_value_heads)
    forward_s, backward_s = (round(took, 9) for took in gpu)
    return (tp, shape.batch, shape.seq, *sizes, spec.head_dim, forward_s, backward_s)


def _on_gpu(
    session: Session, group: Group, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]
) -> list[float]:
    for _ in range(2):
        backward(forward())
    session.meet(group)
    begin = time.perf_counter()
    backward(forward())
    session.wait()
    once = session.worst([time.perf_counter() - begin], group)[0]
    count = 2 if session.small else max(8, round(SECONDS / once))
    marks = []
    for _ in range(count):
        before = session.mark()
        y = forward()
        between = session.mark()
        backward(y)
        marks.append((before, between, session.mark()))
    session.wait()
    kept = marks[count // 2 :]
    medians = [statistics.median(one[i].until(one[i + 1]) for one in kept) for i in range(2)]
    return session.worst(medians, group)
