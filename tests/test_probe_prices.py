"""What a profile measured is what the planner charges: exact where it was measured, never shorter for more work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.layout import Layout, even_layers
from triweave.planner.machine import Curve, Machine
from triweave.planner.profile import CopyCurve, HostCost, MatmulTable, OperationCurve, Profile, Slowdown, read_profile
from triweave.planner.profile_layers import held_layers
from triweave.planner.profile_machine import machine_from_profile
from triweave.planner.time_attention import attention_s
from triweave.planner.time_matmul import Operands, Precision, matmul_s
from triweave.planner.time_step import HOST_SLOWER, Breakdown, StepTime, predict_step
from triweave.probe.operations import sizes
from triweave.probe.shapes import products, products_of
from triweave.probe.table import to_text

TWO = parse_cluster("1x2xh200-141gb")
MODEL = replace(find_model("llama-3.1-8b"), max_position_embeddings=8192)
SEQ = 8192
OPERATIONS = (
    *("layer norms", "norm backward", "rotary", "rotary backward", "swiglu", "swiglu backward"),
    *("loss", "loss backward", "lookup", "lookup backward", "add", "norm of gradients", "adamw", "copy"),
    *("fp8 amax", "fp8 cast"),
)


def _table(precision: Precision, operands: Operands, rate: float) -> MatmulTable:
    points = [one for one in products(small=False) if one.operands == operands]
    return MatmulTable(precision, operands, tuple((*one[1:], 3e-6 + one.flops / rate) for one in points))


@cache
def measured() -> Profile:
    """A profile with every table that a probe of two GPUs fills, at rates near those of H200."""
    kinds: tuple[Operands, ...] = ("NT", "NN", "TN")
    tables = [_table(precision, kind, rate) for precision, rate in (("bf16", 7e14), ("fp8", 12e14)) for kind in kinds]  # type: ignore[arg-type]
    curves = tuple(
        OperationCurve(name, tuple((4 * size, 2e-6 + 4 * size / 3.6e12) for size in sizes(small=False)))  # type: ignore[arg-type]
        for name in OPERATIONS
    )
    slices = tuple((mib << 20, 4e-6 + (mib << 20) / 350e9) for mib in (8, 32, 128))
    buffers = tuple((mib << 20, 1e-5 + (mib << 20) / 700e9) for mib in (16, 1024))
    return replace(
        read_profile(Path(__file__).parent / "golden" / "profile_h200.yaml"),
        matmul=tuple(tables),
        operations=curves,
        host_copy_bytes_seconds=((1 << 20, 3e-5), (1 << 30, 2e-2)),
        copies=(
            CopyCurve("slice", 2, slices),
            *(CopyCurve(what, 2, buffers) for what in ("gather", "reduce_scatter", "all_reduce")),
        ),
        slowdowns=(Slowdown("copies", 0.3), Slowdown("buffers", 0.4), Slowdown("collectives", 0.45)),
        layers=((1, 1, SEQ, 4096, 14336, 32, 8, 128, 7e-3, 14e-3),),
        hosts=(HostCost(1, None, (), 0.6e-3, 0.8e-3, 0.4e-3),),
        launch_seconds=5e-6,
    )


@cache
def machine() -> Machine:
    return machine_from_profile(measured(), TWO)


def step(profile: Profile, layout: Layout, precision: Precision = "bf16", seq: int = SEQ) -> Breakdown:
    """Where a step's seconds go by a profile."""
    spec = replace(MODEL, num_hidden_layers=8)
    whole = replace(layout, layers=even_layers(8, layout.num_stages))
    on = machine_from_profile(profile, TWO)
    return predict_step(spec, whole, TWO, seq_len=seq, global_batch=4, precision=precision, on=on).breakdown


def test_products_are_charged_as_measured() -> None:
    """Each product of each table costs exactly what was measured, in either precision and any order of operands."""
    for table in measured().matmul:
        for m, n, k, seconds in table.m_n_k_seconds:
            assert matmul_s(machine(), m, n, k, table.precision, table.operands) == seconds


@given(
    st.sampled_from([(6144, 4096), (14336, 4096), (8192, 3584)]),
    st.sampled_from(["NT", "NN", "TN"]),
    st.lists(st.integers(256, 40000), min_size=2, max_size=8, unique=True),
)
def test_more_tokens_never_take_less(weight: tuple[int, int], operands: Operands, tokens: list[int]) -> None:
    """For a weight that was measured, time grows with tokens: between its points, below the first, above the last."""
    at = {"NT": 0, "NN": 1, "TN": 2}[operands]
    times = []
    for count in sorted(tokens):
        _, m, n, k = products_of(count, *weight)[at]
        times.append(matmul_s(machine(), m, n, k, "bf16", operands))
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(times))


@given(st.integers(9, 18), st.floats(0.01, 0.99))
def test_between_two_points_time_is_between_theirs(log_tokens: int, share: float) -> None:
    """A number of tokens between two measured ones costs no less than the smaller and no more than the larger."""
    counts = (2048, 4096, 8192, 16384)
    first = counts[log_tokens % 3]
    tokens = round(first * 2**share)
    low, here, high = (matmul_s(machine(), count, 6144, 4096, "bf16", "NT") for count in (first, tokens, 2 * first))
    assert low <= here <= high


def test_weights_that_were_not_measured_follow_their_neighbours() -> None:
    """A weight a little wider than one that was measured runs at about its rate, whatever the model alone says."""
    slow = replace(
        measured(),
        matmul=tuple(
            replace(table, m_n_k_seconds=tuple((m, n, k, 3 * seconds) for m, n, k, seconds in table.m_n_k_seconds))
            for table in measured().matmul
        ),
    )
    for wide in (6400, 14848):
        fast_s, slow_s = (
            matmul_s(on, 8192, wide, 4096, "bf16", "NT") for on in (machine(), machine_from_profile(slow, TWO))
        )
        assert slow_s / fast_s == pytest.approx(3, rel=0.01)
        assert 2 * 8192 * wide * 4096 / fast_s == pytest.approx(7e14, rel=0.1)


def test_attention_is_charged_as_measured() -> None:
    """Each shape costs what was measured, forward and backward; one between two shapes costs something between."""
    (cudnn,) = [table for table in measured().attention if table.kernel == "cudnn"]
    for batch, seq, heads, _, head_dim, *seconds in cudnn.shape_forward_backward_seconds:
        assert attention_s(machine(), "cudnn", batch, seq, heads, head_dim) == pytest.approx(tuple(seconds))
    shorter, between, longer = (attention_s(machine(), "cudnn", 1, seq, 16, 128) for seq in (4096, 6144, 8192))
    assert all(a < b < c for a, b, c in zip(shorter, between, longer, strict=True))


@given(st.lists(st.floats(1, 1e12), min_size=2, max_size=6, unique=True))
def test_curves_are_exact_and_never_fall(sizes_bytes: list[float]) -> None:
    """A curve gives its own points back, and more bytes never take less time."""
    curve = Curve((1e4, 1e6, 1e9), (1e-5, 2e-5, 3e-3))
    for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
        assert curve(size) == pytest.approx(seconds)
    times = [curve(size) for size in sorted(sizes_bytes)]
    assert all(before <= after * (1 + 1e-12) for before, after in pairwise(times))


def test_whole_layers_cost_what_was_measured() -> None:
    """The step charges a layer what the whole layer took, not the sum of its parts; and says how far these were off."""
    (held,) = held_layers(measured(), machine())
    assert held.priced == pytest.approx(held.measured)
    (parts,) = held_layers(measured(), machine_from_profile(replace(measured(), layers=()), TWO))
    assert parts.priced != pytest.approx(parts.measured, rel=1e-3)


def test_the_table_says_how_far_parts_are_from_layers() -> None:
    """The last lines of a probe hold a whole layer against the sum of its parts, by the planner's own prices."""
    lines = list(to_text(replace(measured(), parts=("gemm", "attention", "memory", "layers"))))
    (layer,) = [line for line in lines if line.startswith("layer, tp 1")]
    (parts,) = held_layers(measured(), machine_from_profile(replace(measured(), layers=()), TWO))
    assert f"its parts {100 * (parts.priced[0] / parts.measured[0] - 1):+.1f} %" in layer
    assert any(line.startswith("bf16 forward") and "TFLOP/s" in line for line in lines)


def _twice(points: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((size, 2 * seconds) for size, seconds in points)


def _doubled(key: str, which: Callable[[Any], bool] = lambda one: True) -> Profile:
    """The profile with one of its tables, or some of its curves, taking twice as long."""
    value = getattr(measured(), key)
    changed: Any
    if key.endswith("bytes_seconds"):
        changed = _twice(value)
    elif key == "matmul":
        changed = tuple(
            replace(one, m_n_k_seconds=tuple((*shape, 2 * seconds) for *shape, seconds in one.m_n_k_seconds))
            if which(one)
            else one
            for one in value
        )
    elif key == "attention":
        changed = tuple(
            replace(
                one,
                shape_forward_backward_seconds=tuple(
                    (*shape, 2 * ahead, 2 * back) for *shape, ahead, back in one.shape_forward_backward_seconds
                ),
            )
            for one in value
        )
    elif key == "slowdowns":
        changed = tuple(
            replace(one, seconds_lost_per_second=2 * one.seconds_lost_per_second) if which(one) else one
            for one in value
        )
    elif key == "launch_seconds":
        changed = 1000 * value
    else:
        changed = tuple(replace(one, bytes_seconds=_twice(one.bytes_seconds)) if which(one) else one for one in value)
    return replace(measured(), **{key: changed, "layers": ()})


DP, TP, FULL = Layout(dp=2, shard="optimizer"), Layout(tp=2), Layout(dp=2, shard="full")
CASES = [
    ("matmul", lambda one: one.precision == "bf16" and one.operands == "NT", DP, "bf16"),
    ("matmul", lambda one: one.precision == "bf16" and one.operands == "NN", DP, "bf16"),
    ("matmul", lambda one: one.precision == "bf16" and one.operands == "TN", DP, "bf16"),
    ("matmul", lambda one: one.precision == "fp8", DP, "fp8"),
    ("attention", None, DP, "bf16"),
    *(("operations", name, TP if name in ("add", "copy") else DP, "bf16") for name in OPERATIONS[:14]),
    ("operations", "fp8 amax", DP, "fp8"),
    ("operations", "fp8 cast", DP, "fp8"),
    ("memory_bytes_seconds", None, FULL, "bf16"),
    ("host_copy_bytes_seconds", None, DP, "bf16"),
    ("collectives", lambda one: one.kind == "all_gather", FULL, "bf16"),
    ("collectives", lambda one: one.kind == "reduce_scatter", FULL, "bf16"),
    ("collectives", lambda one: one.kind == "all_reduce", Layout(tp=2, sequence_parallel=False), "bf16"),
    ("point_to_point", None, Layout(pp=2), "bf16"),
    ("copies", lambda one: one.what == "slice", TP, "bf16"),
    ("copies", lambda one: one.what == "gather", DP, "bf16"),
    ("copies", lambda one: one.what == "reduce_scatter", DP, "bf16"),
    ("copies", lambda one: one.what == "all_reduce", Layout(dp=2, shard="none"), "bf16"),
    ("slowdowns", lambda one: one.beside == "copies", TP, "bf16"),
    ("slowdowns", lambda one: one.beside == "buffers", DP, "bf16"),
    ("slowdowns", lambda one: one.beside == "collectives", FULL, "bf16"),
    ("launch_seconds", None, DP, "bf16"),
]


@pytest.mark.parametrize(("key", "which", "layout", "precision"), CASES)
def test_everything_measured_is_priced(key: str, which: Any, layout: Layout, precision: Precision) -> None:
    """Each table that takes twice as long (a launch a thousand times) makes a step of the trainer longer."""
    chosen: Callable[[Any], bool] = (
        (lambda one: one.operation == which) if isinstance(which, str) else which or (lambda one: True)
    )
    before = step(replace(measured(), layers=()), layout, precision).total
    assert step(_doubled(key, chosen), layout, precision).total > before


def test_layers_that_the_host_issues_slowly_are_priced() -> None:
    """Where the host needs longer for a layer than the GPU, the step waits for it; where it does not, for nothing."""
    slow = replace(measured(), hosts=(HostCost(1, None, (), 30e-3, 40e-3, 20e-3),))
    assert step(slow, DP).host > 8 * 2 * 0.9 * (90e-3 - 21e-3)
    arriving = step(measured(), DP).host
    assert step(replace(slow, hosts=()), DP).host == pytest.approx(arriving)


def test_hooks_of_data_parallel_ranks_take_the_host_time() -> None:
    """What sharing among replicas adds to a layer's issue is added to every layer, recomputed or not."""
    plain = HostCost(1, None, (), 30e-3, 40e-3, 20e-3)
    again = replace(plain, recompute=("layer",), backward_input_seconds=70e-3)
    hooked = HostCost(1, "optimizer", (), 35e-3, 65e-3, 0.0)
    for layout, one in ((DP, plain), (replace(DP, recompute=("layer",)), again)):
        without = step(replace(measured(), hosts=(plain, again)), layout).total
        more = step(replace(measured(), hosts=(plain, again, hooked)), layout).total - without
        assert more == pytest.approx(2 * 8 * 10e-3), one


def test_casts_to_fp8_take_the_host_time() -> None:
    """What they add to a layer's issue is added in fp8, again where the layer runs again, and never in bf16."""
    plain = HostCost(1, None, (), 30e-3, 40e-3, 20e-3)
    again = replace(plain, recompute=("layer",), backward_input_seconds=70e-3)
    cast = HostCost(1, None, (), 36e-3, 43e-3, 21e-3, "fp8")

    def added(layout: Layout, precision: Precision) -> float:
        without, beside = (replace(measured(), hosts=hosts) for hosts in ((plain, again), (plain, again, cast)))
        return step(beside, layout, precision).total - step(without, layout, precision).total

    assert added(DP, "fp8") == pytest.approx(2 * 8 * 10e-3)
    assert added(replace(DP, recompute=("layer",)), "fp8") == pytest.approx(2 * 8 * 16e-3)
    assert added(DP, "bf16") == 0


def test_attention_beyond_the_longest_sequence_goes_on_as_it_was_there() -> None:
    """Four times as long as anything measured, a kernel is as far from its model as at the longest that was."""
    (cudnn,) = [table for table in measured().attention if table.kernel == "cudnn"]
    points = tuple((*shape, 1.3 * a, 1.3 * b) for *shape, a, b in cudnn.shape_forward_backward_seconds)
    longest, heads = max((seq, heads) for _, seq, heads, *_ in points)
    slow = replace(measured(), attention=(replace(cudnn, shape_forward_backward_seconds=points),))  # type: ignore[arg-type]
    measured_on, modelled_on = (machine_from_profile(one, TWO) for one in (slow, replace(slow, attention=())))

    def off(seq: int) -> list[float]:
        found, model = (attention_s(on, "cudnn", 1, seq, heads, 128) for on in (measured_on, modelled_on))
        return [seconds / modelled for seconds, modelled in zip(found, model, strict=True)]

    assert off(longest) == pytest.approx([1.3, 1.3], rel=0.03)
    assert off(4 * longest) == pytest.approx(off(longest))


NO_SLICES = Layout(tp=2, sequence_parallel=False)


def test_layers_measured_with_slices_say_nothing_of_layers_without() -> None:
    """Whole layers over two ranks were measured with sequence parallelism: without it one rank's layers count."""
    one, *_ = measured().layers
    two = (2, *one[1:8], 5e-3, 10e-3)
    slow = replace(measured(), layers=(one, two))
    assert step(slow, TP).total > 1.1 * step(measured(), TP).total
    assert step(slow, NO_SLICES) == step(measured(), NO_SLICES)


def test_all_reduces_between_layers_take_what_was_measured() -> None:
    """Of a layer's four, two are waited for and two hide behind weight gradients, as the head's does."""
    (curve,) = [one for one in measured().collectives if one.kind == "all_reduce"]
    activation, statistics = (Curve(*zip(*curve.bytes_seconds, strict=True))(SEQ * size) for size in (2 * 4096, 4))
    qkv, gate_up, head = (matmul_s(machine(), rows, 4096, SEQ, "bf16", "TN") for rows in (3072, 14336, 64128))
    hidden = [max(0.0, activation - beside) + 0.45 * min(activation, beside) for beside in (qkv, gate_up, head)]
    embedding = activation
    a_micro_batch = 8 * (2 * activation + hidden[0] + hidden[1]) + embedding + hidden[2] + 2 * statistics
    without_layers = replace(measured(), layers=())
    assert step(without_layers, NO_SLICES).tensor_parallel == pytest.approx(4 * a_micro_batch)
    # What a profile does not hold is known of other machines, and training reaches less of it.
    assert step(replace(without_layers, collectives=()), NO_SLICES).tensor_parallel > 5 * a_micro_batch


def test_a_head_that_is_the_embedding_is_updated_once_and_summed_between_its_ranks() -> None:
    """One weight has one update; where its two ends are on two ranks, these sum its gradients, which nothing hides."""

    def told(tied: bool, pp: int) -> Breakdown:
        spec = replace(MODEL, num_hidden_layers=8, tie_word_embeddings=tied)
        layout = Layout(pp=pp, layers=even_layers(8, pp))
        return predict_step(spec, layout, TWO, seq_len=SEQ, global_batch=4, on=machine()).breakdown

    head = MODEL.vocab_size * MODEL.hidden_size
    layers = 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    one, two = told(True, 1), told(False, 1)
    assert one.optimizer / two.optimizer == pytest.approx((layers + head) / (layers + 2 * head), rel=1e-3)
    (curve,) = [one for one in measured().collectives if one.kind == "all_reduce"]
    seconds = Curve(*zip(*curve.bytes_seconds, strict=True))(4 * head)
    assert told(True, 2) == replace(told(False, 2), data_parallel=pytest.approx(seconds))  # type: ignore[arg-type]


@given(st.floats(0.1, 40.0), st.sampled_from([Layout(), Layout(pp=2), Layout(pp=2, schedule="zero-bubble")]))
def test_a_slower_host_is_inside_the_range(factor: float, layout: Layout) -> None:
    """Whether or not the step waits for its host, one that is half as slow again ends the range at the earliest."""

    def told(times: float) -> StepTime:
        (one,) = measured().hosts
        parts = one.forward_seconds, one.backward_input_seconds, one.backward_weight_seconds
        profile = replace(measured(), hosts=(HostCost(1, None, (), *(part * times for part in parts)),))
        whole = replace(layout, layers=even_layers(8, layout.num_stages))
        spec, on = replace(MODEL, num_hidden_layers=8), machine_from_profile(profile, TWO)
        return predict_step(spec, whole, TWO, seq_len=SEQ, global_batch=4, on=on)

    assert told(factor).range_s[1] >= told(HOST_SLOWER * factor).step_s * (1 - 1e-9)
