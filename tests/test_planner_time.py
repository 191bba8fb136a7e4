"""Step times: what they must obey, and measurements of one rank and two GPUs that nothing was fitted to."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.errors import InputError
from triweave.layout import Layout, Recompute, Schedule, Shard, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.machine import MACHINES, Precision, machine
from triweave.planner.time_actions import action_costs
from triweave.planner.time_collectives import all_reduce_ports_s, reduce_scatter_s
from triweave.planner.time_layer import layer_work
from triweave.planner.time_listing import layer_operations
from triweave.planner.time_operations import Kernel, moved
from triweave.planner.time_parts import add, place_of
from triweave.planner.time_pipeline import StageCost
from triweave.planner.time_shapes import Decoder, decoder_of
from triweave.planner.time_stack import COMPILED, Bytes, Rerun, Stack
from triweave.planner.time_step import StepTime, predict_step
from triweave.planner.time_trainer import EAGER as EAGER_KERNELS
from triweave.planner.time_trainer import FUSED as FUSED_KERNELS
from triweave.planner.time_trainer import TRIWEAVE_EAGER, TRIWEAVE_FUSED, Kernels

LLAMA_8B = Decoder(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = Decoder(80, 8192, 28672, 64, 8, 128, 128256)
H200 = MACHINES["h200-141gb"]
OP = dataclasses.replace(COMPILED, rerun=Rerun(matmul=0.5, memory=1.0))
"""torchtitan's selective recomputation: every second product and all element-wise operations again."""

EAGER = dataclasses.replace(
    TRIWEAVE_EAGER,
    # A plain layer lets autograd differentiate norm and silu(gate) * up: dy up, dy silu, silu's own, halves joined.
    norm=Bytes(4, 10),
    activation=Bytes(
        TRIWEAVE_EAGER.activation.forward,
        moved(
            (
                Kernel("dy up", 4, 2, strided=True),
                Kernel("dy silu", 4, 2),
                Kernel("silu backward", 4, 2, strided=True),
                Kernel("halves side by side", 4, 4),
            )
        ),
    ),
)

# One rank's layer on H200: model, TP, sequence, batch, eager ms, compiled ms. No communication, nothing recomputed.
LAYERS = [
    (LLAMA_70B, 8, 4096, 1, 5.27, 4.91),
    (LLAMA_70B, 8, 8192, 1, 10.44, 9.95),
    (LLAMA_70B, 8, 4096, 2, 10.06, 9.31),
    (LLAMA_70B, 4, 4096, 1, 9.61, 9.15),
    (LLAMA_70B, 2, 4096, 1, 18.46, 17.74),
    (LLAMA_8B, 1, 8192, 1, 22.77, 20.77),
    (LLAMA_8B, 1, 8192, 2, 45.32, 41.82),
    (LLAMA_8B, 2, 8192, 2, 23.21, 21.32),
]


def layer_ms(decoder: Decoder, tp: int, seq: int, batch: int, stack: Stack) -> float:
    layout = Layout(tp=tp, micro_batch=batch, sequence_parallel=False)
    place = place_of(decoder, layout, H200, stack, seq_len=seq, gpus_per_node=8, precision="bf16")
    work = layer_work(place)
    parts = add(work.forward, work.backward_input, work.backward_weight)
    return 1e3 * (parts.matmul + parts.attention + parts.memory)


def test_layer_table_of_h200() -> None:
    """The layer ceilings measured on H200, compiled and eager: 3 % on average, 5 % at most, no bias over 1 %."""
    errors = [
        layer_ms(decoder, tp, seq, batch, stack) / ms - 1
        for decoder, tp, seq, batch, eager, compiled in LAYERS
        for stack, ms in ((EAGER, eager), (COMPILED, compiled))
    ]
    assert statistics.mean(map(abs, errors)) <= 0.03
    assert max(map(abs, errors)) <= 0.05
    assert abs(statistics.mean(errors)) <= 0.01


def test_eager_layers_cost_what_their_bytes_say() -> None:
    """Eager less compiled, where the products cancel out: within a fifth on average over the eight layers."""
    ratios = [
        (layer_ms(decoder, tp, seq, batch, EAGER) - layer_ms(decoder, tp, seq, batch, COMPILED)) / (eager - compiled)
        for decoder, tp, seq, batch, eager, compiled in LAYERS
    ]
    assert 0.8 < statistics.mean(ratios) < 1.2


# Steps of this package's trainer on two H200 (bench/results/2026-11-30-speed-2xh200.md), seconds.
SEVENTY = Decoder(4, 8192, 28672, 64, 8, 128, 32000)
OURS = [
    (LLAMA_8B, 8192, 4, Layout(tp=2), 1.898),
    (LLAMA_8B, 8192, 4, Layout(tp=2, recompute=("norm", "swiglu")), 1.941),
    (LLAMA_8B, 8192, 4, Layout(pp=2), 2.207),
    (LLAMA_8B, 8192, 4, Layout(pp=2, schedule="zero-bubble"), 1.976),
    (LLAMA_8B, 8192, 4, Layout(pp=2, vpp=2, schedule="interleaved"), 2.052),
    (LLAMA_8B, 8192, 4, Layout(dp=2, shard="full"), 1.980),
    (LLAMA_8B, 8192, 4, Layout(dp=2, shard="full", recompute=("layer",)), 2.465),
    (SEVENTY, 4096, 8, Layout(tp=2), 0.752),
    (SEVENTY, 4096, 8, Layout(tp=2, recompute=("norm", "swiglu")), 0.763),
    (SEVENTY, 4096, 8, Layout(pp=2), 0.819),
    (SEVENTY, 4096, 8, Layout(pp=2, schedule="zero-bubble"), 0.760),
    (SEVENTY, 4096, 8, Layout(pp=2, vpp=2, schedule="interleaved"), 0.781),
    (SEVENTY, 4096, 8, Layout(dp=2, shard="full"), 0.920),
    (SEVENTY, 4096, 8, Layout(dp=2, shard="full", recompute=("layer",)), 1.113),
]


def test_our_own_steps() -> None:
    """Fourteen steps of the eager trainer: no bias over 1 %, 3.5 % on average, 6 % at most."""
    cluster = parse_cluster("1x2xh200-141gb")
    errors = []
    for decoder, seq, batch, layout, measured in OURS:
        full = dataclasses.replace(layout, layers=even_layers(decoder.layers, layout.num_stages))
        step = predict_step(decoder, full, cluster, seq_len=seq, global_batch=batch, stack=TRIWEAVE_EAGER)
        errors.append(step.step_s / measured - 1)
    assert abs(statistics.mean(errors)) <= 0.01
    assert statistics.mean(map(abs, errors)) <= 0.035
    assert max(map(abs, errors)) <= 0.06


@pytest.mark.parametrize(("stack", "kernels"), [(TRIWEAVE_EAGER, EAGER_KERNELS), (TRIWEAVE_FUSED, FUSED_KERNELS)])
def test_a_layer_is_the_sum_of_its_operations(stack: Stack, kernels: Kernels) -> None:
    """The listed operations take what the step is charged for, and their FLOPs are the model's, causal."""
    layout = Layout(tp=2, sequence_parallel=True)
    place = place_of(LLAMA_8B, layout, H200, stack, seq_len=8192, gpus_per_node=8, precision="bf16")
    work, listed = layer_work(place), layer_operations(place, kernels)
    parts = add(work.forward, work.backward_input, work.backward_weight)
    assert sum(one.seconds for one in listed) == pytest.approx(parts.matmul + parts.attention + parts.memory)
    # The attention kernel computes the scores again in backward: 3.5 forwards instead of 3.
    tokens, attention = 8192, 2 * 32 * 128 * 8192
    expected = tokens * (6 * LLAMA_8B.layer_parameters + 3.5 * attention) / 2
    assert sum(one.flops for one in listed) == pytest.approx(expected)


def test_fusing_and_overlapping_only_shorten() -> None:
    """With fused kernels and every overlap no part of a step is longer, whatever the layout."""
    for layout in (Layout(tp=2), Layout(pp=2), Layout(dp=2, shard="full"), Layout(dp=2, shard="optimizer")):
        full = dataclasses.replace(layout, layers=even_layers(32, layout.num_stages))
        cluster = parse_cluster("1x2xh200-141gb")
        eager, fused = (
            predict_step(LLAMA_8B, full, cluster, seq_len=8192, global_batch=4, stack=stack).breakdown
            for stack in (TRIWEAVE_EAGER, TRIWEAVE_FUSED)
        )
        for name in ("memory_bound", "tensor_parallel", "data_parallel", "total"):
            assert getattr(fused, name) <= getattr(eager, name) + 1e-12, (layout, name)


@pytest.mark.parametrize(
    ("layout", "stack", "batch", "low", "high"),
    [
        (Layout(dp=2, micro_batch=2, shard="full", layers=(32,)), OP, 4, 9300, 9470),
        (Layout(tp=2, micro_batch=2, layers=(32,)), COMPILED, 2, 9280, 9710),
        (Layout(tp=2, micro_batch=2, layers=(32,)), OP, 2, 8520, 8850),
        (Layout(pp=2, layers=(16, 16)), OP, 8, 8370, 8540),
    ],
    ids=["fsdp", "tp", "tp selective", "pp"],
)
def test_torchtitan_on_two_h200(layout: Layout, stack: Stack, batch: int, low: float, high: float) -> None:
    """Tokens a second of a peer on two H200, four layouts, predicted to 4 % with nothing fitted to them."""
    cluster = parse_cluster("1x2xh200-141gb")
    step = predict_step(LLAMA_8B, layout, cluster, seq_len=8192, global_batch=batch, stack=stack)
    assert low / 1.04 <= step.tokens_per_s_per_gpu <= high * 1.04


def predicted(decoder: Decoder | ModelSpec = LLAMA_70B, **changes: object) -> StepTime:
    """A step of 70B on four nodes, TP 8 x PP 4, changed as asked."""
    options: dict[str, object] = {"seq_len": 4096, "global_batch": 128, "cluster": "4x8xh100-80gb"}
    options |= {key: changes.pop(key) for key in list(changes) if key in {*options, "precision", "stack"}}
    layout = Layout(**{"tp": 8, "pp": 4, **changes})  # type: ignore[arg-type]
    if not layout.layers:
        layout = dataclasses.replace(layout, layers=even_layers(decoder_of(decoder).layers, layout.num_stages))
    cluster = parse_cluster(str(options.pop("cluster")))
    return predict_step(decoder, layout, cluster, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "full"])
def test_breakdown_sums_to_the_step(schedule: str, shard: Shard) -> None:
    """Whatever the schedule and the sharding, the parts are not negative and sum to the step."""
    step = predicted(tp=4, pp=4, dp=2, schedule=schedule, shard=shard, recompute=("swiglu",))
    parts = dataclasses.astuple(step.breakdown)
    assert min(parts) >= -1e-9
    assert sum(parts) == pytest.approx(step.step_s) == pytest.approx(step.breakdown.total)


def test_interleaving_cuts_the_bubble() -> None:
    """Five virtual stages a rank make a shorter step than one, and a smaller bubble."""
    plain, virtual = predicted(global_batch=16), predicted(global_batch=16, vpp=5, schedule="interleaved")
    assert virtual.bubble < plain.bubble
    assert virtual.step_s < plain.step_s


def test_model_spec_and_decoder_agree() -> None:
    """A Llama from its config and the same shapes by hand give the same step; FLOPs are `ModelSpec`'s own."""
    spec = ModelSpec(128256, 8192, 28672, 80, 64, 8, 128)
    assert predicted(spec).step_s == predicted().step_s
    for causal in (True, False):
        assert LLAMA_70B.flops_per_token(4096, causal=causal) == spec.flops_per_token(4096, causal=causal)


def test_mfu_states_both_ways_and_its_peak() -> None:
    """Full attention counts more FLOPs than causal; both are tokens x FLOPs over the peak that is named."""
    step = predicted()
    assert step.mfu.peak_flops == 989e12
    for value, causal in ((step.mfu.causal, True), (step.mfu.full, False)):
        flops = LLAMA_70B.flops_per_token(4096, causal=causal) * step.tokens_per_s_per_gpu
        assert value == pytest.approx(flops / 989e12)
    assert step.mfu.causal < step.mfu.full < 1
    assert predicted(precision="fp8").mfu.peak_flops == 1979e12


def test_range_holds_the_step() -> None:
    """The 90 % range is around the step, wider where more of it is communication and waiting."""
    calm, busy = predicted(), predicted(global_batch=4)
    for step in (calm, busy):
        low, high = step.range_s
        assert 0 < low < step.step_s < high
    assert busy.range_s[1] / busy.step_s > calm.range_s[1] / calm.step_s


def test_recomputing_more_takes_longer() -> None:
    """Nothing, norms, SwiGLU, attention, MLP, whole layers: each costs more, whole layers 20 to 40 % of the step."""
    levels: tuple[tuple[Recompute, ...], ...] = ((), ("norm",), ("swiglu",), ("attention",), ("mlp",), ("layer",))
    times = [predicted(recompute=level).step_s for level in levels]
    assert times == sorted(times)
    assert 1.2 < times[-1] / times[0] < 1.4


def test_tensor_parallel_across_nodes_is_priced() -> None:
    """TP 16 over two nodes is answered, and slower than TP 8 inside one by what its collectives cost."""
    inside, across = predicted(), predicted(tp=16, pp=2)
    assert across.breakdown.tensor_parallel > 2 * inside.breakdown.tensor_parallel
    assert across.step_s > inside.step_s


def test_messages_are_whole_without_sequence_parallelism() -> None:
    """As the trainer sends them: `[seq/tp, batch, hidden]` with it, `[seq, batch, hidden]` on every rank without."""
    layout = Layout(tp=2, pp=2, sequence_parallel=True, layers=(16, 16))
    cut, whole = (
        action_costs(
            find_model("llama-3.1-8b"),
            dataclasses.replace(layout, sequence_parallel=sequence_parallel),
            parse_cluster("2x2xh200-141gb"),
            seq_len=4096,
            global_batch=4,
        )
        for sequence_parallel in (True, False)
    )
    network = machine("h200-141gb")
    sent = (whole.transfer_s - cut.transfer_s) * network.nic_bytes_per_s * network.nic_efficiency
    assert sent == pytest.approx(2 * 4096 * 4096 / 2)


def test_head_imbalance_is_waited_for() -> None:
    """With a vocabulary four times as large the last stage sets the pace: four layers fewer there shorten the step."""
    large = dataclasses.replace(LLAMA_70B, vocab=4 * LLAMA_70B.vocab)
    assert predicted(large, layers=(21, 21, 22, 16)).step_s < 0.95 * predicted(large).step_s
    assert predicted(layers=(21, 21, 22, 16)).step_s > predicted().step_s


def test_small_layers_wait_for_the_host() -> None:
    """A tiny micro-batch of a tiny model is bound by kernel launches, a large one is not."""
    tiny = Decoder(24, 1024, 4096, 16, 16, 64, 32000)
    small = predicted(tiny, tp=1, pp=1, dp=32, seq_len=128, global_batch=32)
    large = predicted(tiny, tp=1, pp=1, dp=32, seq_len=4096, global_batch=512, micro_batch=16)
    assert small.breakdown.host > 0.3 * small.step_s
    assert large.breakdown.host == 0.0


@pytest.mark.parametrize(
    ("precision", "forward_ms", "backward_ms"), [("bf16", 0.78, 1.53), ("fp8", 1.14, 2.10)], ids=["bf16", "fp8"]
)
def test_graphs_need_little_of_the_host(precision: Precision, forward_ms: float, backward_ms: float) -> None:
    """20 layers as graphs take a host what was measured, whatever is recomputed, and a weight half a launch a layer."""
    question = {"seq_len": 4096, "global_batch": 32, "precision": precision}

    def hosts(schedule: Schedule = "1f1b", **changes: Any) -> StageCost:
        layout = Layout(tp=8, pp=4, schedule=schedule, layers=even_layers(80, 4), cuda_graphs=True)
        layout = dataclasses.replace(layout, **changes)
        return action_costs(LLAMA_70B, layout, parse_cluster("4x8xh200-141gb"), **question).hosts[1]

    assert (1e3 * hosts().forward, 1e3 * hosts().backward_input) == pytest.approx((forward_ms, backward_ms))
    assert hosts(recompute=("layer",)) == hosts()
    assert hosts().backward_weight == 0 < hosts("zero-bubble").backward_weight < hosts().backward_input
    eager = hosts(cuda_graphs=False)
    assert eager.total > 3 * hosts().total
    # Over nodes, sums are collectives, which graphs do not hold.
    across = {"tp": 16, "pp": 2, "layers": even_layers(80, 2)}
    assert hosts(**across) == hosts(**across, cuda_graphs=False)


def test_graphs_end_the_wait_for_the_host() -> None:
    """What a tiny micro-batch waits for its host is gone with graphs; a step that does not wait is as it was."""
    tiny = Decoder(24, 1024, 4096, 16, 16, 64, 32000)
    small = {"tp": 1, "pp": 1, "dp": 32, "seq_len": 512, "global_batch": 32}
    waits, runs = (predicted(tiny, **small, cuda_graphs=graphs) for graphs in (False, True))
    assert waits.breakdown.host > 0 == runs.breakdown.host
    assert waits.step_s - runs.step_s == pytest.approx(waits.breakdown.host)
    assert predicted(cuda_graphs=True) == predicted()


def test_batch_that_does_not_divide_is_refused() -> None:
    """A global batch that dp x micro_batch does not divide, and a missing layer map: both problems, nearest batch."""
    with pytest.raises(InputError) as caught:
        predict_step(
            LLAMA_70B,
            Layout(tp=8, pp=2, dp=2, micro_batch=3),
            parse_cluster("4x8xh100-80gb"),
            seq_len=4096,
            global_batch=128,
        )
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["train.global_batch", "layout.layers"]
    assert caught.value.problems[0].nearest == "126"


def test_a_search_can_afford_it() -> None:
    """Pricing a layout again takes well under 5 ms on a busy machine (0.3 ms on a quiet one)."""
    predicted(pp=4, global_batch=128)
    start = time.perf_counter()
    for _ in range(100):
        predicted(pp=4, global_batch=128)
    assert time.perf_counter() - start < 0.5


def test_time_model_needs_no_torch() -> None:
    """Importing the time model loads neither torch nor numpy."""
    code = "import sys, triweave.planner.time_rows; print(*{'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_across_nodes_nothing_is_cut_in_pieces() -> None:
    """Over two nodes there are no copy engines: each forward waits for two whole collectives a half of a layer."""
    layout = Layout(tp=2, layers=(8,))
    decoder = decoder_of(find_model("llama-3.1-8b"))
    inside, across = (
        place_of(decoder, layout, H200, TRIWEAVE_FUSED, seq_len=8192, gpus_per_node=count, precision="bf16")
        for count in (2, 1)
    )
    once = reduce_scatter_s(H200, across.tp, across.activation_bytes) / TRIWEAVE_FUSED.links
    assert layer_work(across).forward.tensor_parallel == pytest.approx(4 * once)
    at_once = reduce_scatter_s(H200, inside.tp, inside.activation_bytes) / TRIWEAVE_FUSED.links
    assert layer_work(inside).forward.tensor_parallel < 4 * at_once


def test_messages_and_sums_share_their_ports() -> None:
    """Two flows on one port, each with half of it while both want it: a step longer by what a fluid simulation says."""
    layout = Layout(tp=2, pp=2, sequence_parallel=False, layers=(4, 4))
    cluster = parse_cluster("4x1xh200-141gb")
    slow = dataclasses.replace(H200, nic_bytes_per_s=2e9)
    costs = action_costs(
        find_model("llama-3.1-8b"), layout, cluster, seq_len=8192, global_batch=8, stack=TRIWEAVE_FUSED, on=slow
    )
    first, own = costs.stages[0], costs.blocks[0].cost
    message = costs.transfer_s - slow.nic_latency_s
    ports = 4 * 4 * all_reduce_ports_s(slow, costs.place.tp, costs.place.activation_bytes)
    # Work in turns: a slice of products, for which the message has the port alone, and one of sums.
    slices = 10_000
    compute, sums = (own.total - ports) / slices, ports / slices
    now, left = 0.0, message
    while left > 0:
        now, left = now + compute, left - compute
        together = min(2 * sums, 2 * max(0.0, left))
        now, left = now + sums + together / 2, left - together / 2
    longer = now - message
    assert 0.1 * message < longer
    assert first.forward - own.forward == pytest.approx(longer, rel=0.01)
    assert costs.stages[1].backward_input - costs.blocks[1].cost.backward_input > 0
    # The first stage sends no gradient, the last no activation, and inside a node nobody is in a message's way.
    assert first.backward_input == own.backward_input
    assert costs.stages[1].forward == costs.blocks[1].cost.forward
    inside = action_costs(
        find_model("llama-3.1-8b"), layout, parse_cluster("2x2xh200-141gb"), seq_len=8192, global_batch=8, on=slow
    )
    assert inside.stages == tuple(block.cost for block in inside.blocks)
