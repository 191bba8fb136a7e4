"""Recompute: what one layer keeps for backward, to the byte, and that its gradients are the same bits."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from allocations import Allocated, settled
from ranks import Ranks
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from triweave.gradients import main_grad
from triweave.groups import Group
from triweave.layers.attention import AttentionKernel
from triweave.layers.rotary import inverse_frequencies, make_rotation
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Recompute
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec

SPEC = ModelSpec(300, 64, 96, 1, 8, 4, 8)


def random(*shape: int, seed: int) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept_bytes(tokens: int, tp: int, sequence_parallel: bool, recompute: tuple[str, ...]) -> int:
    """What a decoder layer keeps of one bfloat16 micro-batch, term by term."""
    spec = SPEC
    residual = 2 * tokens * spec.hidden_size // (tp if sequence_parallel else 1)
    query, key = 2 * tokens * spec.query_size // tp, 2 * tokens * spec.key_value_size // tp
    ffn = 2 * tokens * spec.intermediate_size // tp
    terms = {
        "input of the first norm": residual,
        "its output, which the qkv product reads": residual,
        "rotated queries and keys, and values": query + 2 * key,
        "attention's log-sum-exp, float32": 4 * tokens * spec.num_attention_heads // tp,
        "attention's output, which o_proj reads": query,
        "input of the second norm": residual,
        "its output, which the gate-and-up product reads": residual,
        "gate and up": 2 * ffn,
        "their product, which down_proj reads": ffn,
    }
    mlp = ("its output, which the gate-and-up product reads", "gate and up", "their product, which down_proj reads")
    attention = list(terms)[1:5]
    gone: dict[str, list[str]] = {
        "norm": [attention[0], mlp[0]],
        "swiglu": [mlp[2]],
        "attention": attention,
        "mlp": [*mlp],
        "layer": list(terms)[1:],
    }
    left_out = {name for option in recompute for name in gone[option]}
    return sum(size for name, size in terms.items() if name not in left_out)


def make_layer(tp: TensorParallel, recompute: tuple[Recompute, ...], dtype: torch.dtype) -> DecoderLayer:
    """A decoder layer with the same weights for every `recompute`."""
    layer = DecoderLayer(SPEC, tp, AttentionKernel(), recompute).to(dtype)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=number) / 5)
    return layer


RECOMPUTE: list[tuple[Recompute, ...]] = [
    *((), *((option,) for option in get_args(Recompute))),
    *(("norm", "swiglu"), ("norm", "attention"), ("norm", "mlp"), ("attention", "mlp")),
]


def measure_layers(
    rank: int, size: int, sequence_parallel: bool, seq: int, batch: int, expected: list[int]
) -> list[int]:
    """Bytes alive after one layer's forward for each of `RECOMPUTE`; gradients must not depend on it."""
    tp = TensorParallel(Group(tuple(range(size)), rank, dist.group.WORLD), sequence_parallel)
    positions = torch.arange(seq).unsqueeze(1).expand(seq, batch)
    rows = seq // size if sequence_parallel else seq
    kept: list[int] = []
    without: list[Tensor] = []
    for recompute, planned in zip(RECOMPUTE, expected, strict=True):
        layer = make_layer(tp, recompute, torch.bfloat16)
        rotation = make_rotation(inverse_frequencies(SPEC), positions, torch.bfloat16)
        with Allocated() as allocated:
            x = random(rows, batch, SPEC.hidden_size, seed=77).bfloat16().requires_grad_()
            y = layer(x, rotation, None)
            # As the pipeline does: the input and the output's place in the graph stay, the output goes.
            edge, upstream = get_gradient_edge(y), torch.ones_like(y)
            del y
        kept.append(settled(allocated, planned + upstream.nbytes) - upstream.nbytes)
        torch.autograd.backward((edge,), (upstream,))
        assert x.grad is not None
        gradients = [x.grad, *(main_grad(parameter) for parameter in layer.parameters())]
        without = without or gradients
        assert all(torch.equal(*pair) for pair in zip(gradients, without, strict=True)), recompute
    return kept


@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["1", "tp2", "tp2-sp"])
def test_layer_keeps_the_formulas_bytes(ranks: Ranks, size: int, sequence_parallel: bool) -> None:
    """A layer keeps exactly the bytes of the published formula, less what is recomputed; gradients stay bit-identical.

    The sum is s b h / tp x (12 + 4 kv/heads + 6 ffn/hidden) + 4 s b heads / tp under sequence parallelism
    (Korthikanti et al. 2205.05198, for Llama).
    """
    seq, batch = 16, 2
    expected = [kept_bytes(seq * batch, size, sequence_parallel, recompute) for recompute in RECOMPUTE]
    assert ranks.run(size, measure_layers, size, sequence_parallel, seq, batch, expected) == [expected] * size
    if sequence_parallel or size == 1:
        h, heads, kv, ffn = SPEC.hidden_size, SPEC.num_attention_heads, SPEC.num_key_value_heads, SPEC.intermediate_size
        closed = seq * batch * h / size * (12 + 4 * kv / heads + 6 * ffn / h) + 4 * seq * batch * heads / size
        assert expected[0] == closed


def test_recompute_options_differ() -> None:
    """Every option keeps less than none, and a whole layer keeps its input alone."""
    sizes = {recompute: kept_bytes(16 * 2, 2, True, recompute) for recompute in RECOMPUTE}
    assert all(size < sizes[()] for recompute, size in sizes.items() if recompute)
    assert sizes[("layer",)] == 2 * 16 * 2 * 64 // 2
