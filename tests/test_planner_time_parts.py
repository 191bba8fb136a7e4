"""The pieces that step times are made of: products, attention, collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.cluster import CATALOGUE, Cluster
from triweave.errors import InputError
from triweave.layout import Layout
from triweave.planner.machine import MACHINES, MIB, Curve, curve_from_bus_bandwidth, machine, machine_of
from triweave.planner.time_attention import attention_s
from triweave.planner.time_collectives import (
    GroupShape,
    all_reduce_s,
    group_shape,
    overlapped_s,
    reduce_scatter_s,
    send_s,
)
from triweave.planner.time_matmul import matmul_s

H200, A100 = MACHINES["h200-141gb"], MACHINES["a100-80gb"]


@pytest.mark.parametrize("known", H200.matmuls, ids=lambda known: f"{known.m}x{known.n}x{known.k}")
def test_measured_product_is_returned(known: object) -> None:
    """A shape that was measured takes the time that was measured."""
    m, n, k, seconds = known.m, known.n, known.k, known.seconds  # type: ignore[attr-defined]
    assert matmul_s(H200, m, n, k, "bf16", "NT") == pytest.approx(seconds, rel=1e-3)


def test_one_tile_too_many_costs_a_wave() -> None:
    """On 108 processors, 109 tiles of 128 x 256 take clearly longer than 108, and 216 no longer a tile than 108."""
    tile_m, tile_n, k = 128, 256, 8192
    full, more, twice = (matmul_s(A100, tile_m * count, tile_n, k, "bf16", "NT") for count in (108, 109, 216))
    assert more > 1.2 * full
    assert twice == pytest.approx(2 * full)


def test_thin_product_is_bound_by_memory() -> None:
    """With one row the weights are read at memory speed, whatever the matrix units could do."""
    m, n, k = 1, 8192, 8192
    assert matmul_s(A100, m, n, k, "bf16", "NT") >= 2 * n * k / A100.hbm_bytes_per_s


def test_short_k_is_less_efficient() -> None:
    """Half of K takes more than half of the time: the prologue stays (what tensor parallelism does to `o_proj`)."""
    whole, half = (matmul_s(A100, 4096, 8192, k, "bf16", "NT") for k in (1024, 512))
    assert half > 0.52 * whole


def test_fp8_is_faster_where_there_is_fp8() -> None:
    """Hopper multiplies fp8 1.5 to 2 times as fast; Ampere has none and takes bf16's time."""
    h100 = MACHINES["h100-80gb"]
    shape = (8192, 8192, 8192)
    assert 1.5 < matmul_s(h100, *shape, "bf16", "NT") / matmul_s(h100, *shape, "fp8", "NT") < 2
    assert matmul_s(A100, *shape, "fp8", "NT") == matmul_s(A100, *shape, "bf16", "NT")


@pytest.mark.parametrize(
    ("batch", "seq", "heads", "forward_ms", "backward_ms"),
    [(1, 4096, 8, 0.113, 0.357), (2, 4096, 32, 0.499, 1.594), (1, 8192, 32, 0.915, 2.947), (1, 8192, 64, 1.733, 5.769)],
)
def test_cudnn_attention_on_h200(batch: int, seq: int, heads: int, forward_ms: float, backward_ms: float) -> None:
    """Within 8 % of what was measured on H200 in all four shapes, forward and backward."""
    forward, backward = attention_s(H200, "cudnn", batch, seq, heads, 128)
    assert forward * 1e3 == pytest.approx(forward_ms, rel=0.08)
    assert backward * 1e3 == pytest.approx(backward_ms, rel=0.08)


def test_scores_in_memory_cost_most_at_long_sequences() -> None:
    """Unfused attention over FlashAttention 2 grows from sequence 1k to 8k: it moves scores, flash does not."""
    ratios = []
    for seq in (1024, 8192):
        slow, fast = (sum(attention_s(A100, name, 1, seq, 40, 128)) for name in ("unfused", "flash2"))  # type: ignore[arg-type]
        ratios.append(slow / fast)
    assert 2 < ratios[0] < ratios[1]


def test_curve_passes_through_its_points() -> None:
    """A curve gives every measured point back, the last bandwidth beyond, the smallest time below."""
    curve = curve_from_bus_bandwidth(8, ((1, 40), (16, 220), (1024, 464)))
    for mib, bus in ((1, 40), (16, 220), (1024, 464)):
        assert mib * MIB * 1.75 / curve(mib * MIB) == pytest.approx(bus * 1e9)
    assert curve(4096 * MIB) == pytest.approx(4 * curve(1024 * MIB))
    assert curve(10.0) == curve(1 * MIB)


@given(st.floats(1e3, 1e11), st.floats(1.0, 10.0), st.sampled_from([2, 4, 8]))
def test_more_bytes_take_no_less_time(size: float, factor: float, ranks: int) -> None:
    """All-reduce time never falls as the tensor grows, inside a node or across four."""
    for nodes in (1, 4):
        group = GroupShape(ranks * nodes, ranks)
        assert all_reduce_s(A100, group, size * factor) >= all_reduce_s(A100, group, size) * (1 - 1e-12)


def test_crossing_nodes_costs() -> None:
    """Sixteen ranks on two nodes are slower than eight on one; with fewer ports a node, slower still."""
    size = 256.0 * MIB
    one, two = (all_reduce_s(A100, GroupShape(ranks, 8), size) for ranks in (8, 16))
    sparse = all_reduce_s(A100, GroupShape(16, 2), size)
    assert one < two < sparse


def test_a_ring_sends_more_over_a_nodes_port_than_a_tree() -> None:
    """Four ranks on two nodes: each node sends 2(n - 1)/n of a sum, n being nodes of a tree and ranks of a ring."""
    size = 1024.0 * MIB
    group = GroupShape(4, 2)
    tree, ring = all_reduce_s(A100, group, size), all_reduce_s(A100, group, size, rings=True)
    assert ring / tree == pytest.approx((2 * 3 / 4) / (2 * 1 / 2), rel=0.01)
    one_each = GroupShape(2, 1)
    assert all_reduce_s(A100, one_each, size, rings=True) == all_reduce_s(A100, one_each, size)


def test_reduce_scatter_and_gather_make_an_all_reduce() -> None:
    """A reduce-scatter takes a little more than half of an all-reduce of the same tensor (it moves half as much)."""
    group, size = GroupShape(8, 8), 512.0 * MIB
    assert 0.5 < reduce_scatter_s(A100, group, size) / all_reduce_s(A100, group, size) < 0.65


def test_one_rank_communicates_nothing() -> None:
    """A group of one takes no time."""
    assert all_reduce_s(A100, GroupShape(1, 1), 1e9) == reduce_scatter_s(A100, GroupShape(1, 1), 1e9) == 0.0


def test_message_between_nodes_is_slower() -> None:
    """A pipeline message of 64 MiB takes longer over a network port than over NVLink."""
    assert send_s(A100, 64.0 * MIB, crosses_nodes=True) > 3 * send_s(A100, 64.0 * MIB, crosses_nodes=False)


def test_group_shapes_follow_the_rank_order() -> None:
    """TP 4 x DP 4 on nodes of 8: tensor groups inside a node, data groups two to a node, stages a node apart."""
    layout = Layout(tp=4, dp=4, pp=2)
    assert group_shape(layout, "tp", 8) == GroupShape(4, 4)
    assert group_shape(layout, "dp", 8) == GroupShape(4, 2)
    assert group_shape(layout, "pp", 8) == GroupShape(2, 1)
    assert group_shape(layout, "dp", 8).nodes == 2


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 0.5))
def test_overlap_is_between_hidden_and_exposed(communication: float, compute: float, slowdown: float) -> None:
    """What overlapped communication adds is never more than itself and never less than what does not fit."""
    added = overlapped_s(communication, compute, slowdown)
    assert max(0.0, communication - compute) <= added <= communication + 1e-12


def test_unknown_gpu_is_named_with_the_nearest() -> None:
    """A GPU without measurements is refused, naming what is known and the nearest."""
    with pytest.raises(InputError, match="h100-80gb") as caught:
        machine("h100-80g")
    assert caught.value.problems[0].nearest == "h100-80gb"


@pytest.mark.parametrize("name", sorted(MACHINES.keys() & CATALOGUE.keys()))
def test_datasheet_figures_stand_in_one_place(name: str) -> None:
    """Peaks, processors and ports of a machine are the catalogue's; nothing measured exceeds them."""
    gpu, known = CATALOGUE[name], machine(name)
    assert (known.peak_bf16, known.peak_fp8 or 0.0, known.sms) == (gpu.peak_flops, gpu.peak_fp8_flops, gpu.num_sms)
    assert known.nic_bytes_per_s == gpu.nic_bandwidth
    assert known.hbm_bytes_per_s < gpu.memory_bandwidth
    assert machine_of(Cluster(4, 8, gpu)) is known


def test_a_cluster_files_figures_reach_the_prediction() -> None:
    """Half the ports, or NVLink and memory at half speed: twice the time of what goes through them."""
    gpu = CATALOGUE["h100-80gb"]
    usual = machine("h100-80gb")
    sparse = machine_of(Cluster(2, 8, gpu, rails=4))
    slow = machine_of(Cluster(2, 8, replace(gpu, nvlink_bandwidth=225e9, memory_bandwidth=gpu.memory_bandwidth / 2)))
    wide, size = GroupShape(16, 1), 1024.0 * MIB
    assert all_reduce_s(sparse, wide, size) == pytest.approx(2 * all_reduce_s(usual, wide, size), rel=0.02)
    inside = GroupShape(8, 8)
    assert all_reduce_s(slow, inside, size) == pytest.approx(2 * all_reduce_s(usual, inside, size))
    assert slow.hbm_bytes_per_s == pytest.approx(usual.hbm_bytes_per_s / 2)
    assert machine_of(Cluster(2, 8, gpu, rails=4)) is sparse


def test_machines_are_compared_by_identity() -> None:
    """A changed machine is another key: no cost of the old one is remembered for it."""
    slower = replace(A100, matmul_ceiling=A100.matmul_ceiling / 2)
    shape = (8192, 8192, 8192)
    assert matmul_s(slower, *shape, "bf16", "NT") == pytest.approx(2 * matmul_s(A100, *shape, "bf16", "NT"))
    assert Curve((1.0, 2.0), (1.0, 2.0))(1.5) == pytest.approx(1.5)
