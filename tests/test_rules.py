"""The rules of legal layouts: each broken on purpose, and all of them against what carries a layout out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from triweave.errors import Problem
from triweave.layout import Layout, Recompute, Schedule, balanced_layers, even_layers
from triweave.model_spec import ModelSpec
from triweave.rules import attention_problems, layout_problems
from triweave.schedule.build import schedule_problems

LLAMA_70B = ModelSpec(128256, 8192, 28672, 80, 64, 8, 128, max_position_embeddings=8192)
SMOL = ModelSpec(49152, 576, 1536, 30, 9, 3, 64, max_position_embeddings=8192)
GOOD = Layout(tp=8, pp=4, dp=2, recompute=("swiglu",), layers=(20, 20, 20, 20))


def problems(
    layout: Layout,
    spec: ModelSpec = LLAMA_70B,
    *,
    world_size: int | None = None,
    seq_len: int = 4096,
    global_batch: int = 128,
    gpus_per_node: int | None = 8,
    tp_across_nodes: bool = False,
) -> list[Problem]:
    """`layout_problems` with the numbers of an ordinary run."""
    return layout_problems(
        spec,
        layout,
        world_size=world_size,
        seq_len=seq_len,
        global_batch=global_batch,
        gpus_per_node=gpus_per_node,
        tp_across_nodes=tp_across_nodes,
    )


@dataclass(frozen=True)
class Case:
    """One rule broken: what is changed in the good layout, and what is told about it."""

    name: str
    key: str
    words: tuple[str, ...]
    """What the rule says, both numbers among it."""
    nearest: str | None
    layout: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)


INTERLEAVED = {"schedule": "interleaved", "vpp": 2, "layers": ()}
ONE = {"pp": 1, "dp": 1, "layers": ()}
GRAPHS = {"cuda_graphs": True}

GRID_CASES = (
    Case("dp", "layout.dp", ("8 x 4 x 1 x 1 = 32", "64 ranks"), "2", {"dp": 1}, rest={"world_size": 64}),
    Case("pp", "layout.pp", ("8 x 3 x 1 = 24", "32 ranks"), "2", {"pp": 3, "layers": ()}, rest={"world_size": 32}),
    Case("tp", "layout.tp", ("4 x 1 x 2 = 8", "6 ranks"), "3", ONE | {"tp": 4, "cp": 2}, rest={"world_size": 6}),
    Case("cp", "layout.cp", ("1 x 1 x 4 = 4", "6 ranks"), "3", ONE | {"tp": 1, "cp": 4}, rest={"world_size": 6}),
    Case("all", "layout", ("4 x 3 x 1", "10 ranks"), "12 ranks", ONE | {"tp": 4, "pp": 3}, rest={"world_size": 10}),
    Case("vpp alone", "layout.vpp", ("schedule: interleaved", "1f1b"), "1", {"vpp": 2, "layers": ()}),
    Case("interleaved alone", "layout.vpp", ("more than 1",), "2", {"schedule": "interleaved"}),
    Case("no pipeline", "layout.schedule", ("pp is 1", "vpp = 2 must be 1"), "1f1b", ONE | INTERLEAVED),
    Case("zero-bubble", "layout.schedule", ("pp is 1",), "1f1b", ONE | {"schedule": "zero-bubble"}),
    Case("batch", "train.global_batch", ("3 x 2 = 6",), "126", {"micro_batch": 3}),
    Case(
        "few",
        "train.global_batch",
        ("2 micro-batches", "pp = 4"),
        "128",
        {"micro_batch": 16},
        rest={"global_batch": 64},
    ),
    Case("groups", "train.global_batch", ("10 micro-batches", "pp = 4"), "16", INTERLEAVED, rest={"global_batch": 20}),
    Case("layer", "layout.recompute", ("the others included",), "[layer]", {"recompute": ("layer", "norm")}),
    Case("mlp", "layout.recompute", ("swiglu",), "[mlp, norm]", {"recompute": ("swiglu", "mlp", "norm")}),
    Case(
        "gathered",
        "layout.keep_gathered",
        ("nothing gathered to keep",),
        "false",
        {"keep_gathered": True, "recompute": ("norm",)},
    ),
    Case("twice", "layout.recompute", ("twice",), "[norm]", {"recompute": ("norm", "norm")}),
    Case("offload twice", "layout.offload", ("twice",), "[mlp]", {"offload": ("mlp", "mlp")}),
    Case("offload all", "layout.offload", ("the others included",), "[layer]", {"offload": ("layer", "mlp")}),
    Case(
        "graphs and gradients", "layout.cuda_graphs", ("shard is gradients",), "false", GRAPHS | {"shard": "gradients"}
    ),
    Case("graphs and offload", "layout.cuda_graphs", ("[mlp] moves it",), "false", GRAPHS | {"offload": ("mlp",)}),
    Case("graphs and context", "layout.cuda_graphs", ("cp = 2",), "false", GRAPHS | {"cp": 2, "tp": 4}),
    Case("graphs of sums", "layout.cuda_graphs", ("tp = 8",), "false", GRAPHS | {"sequence_parallel": False}),
    Case(
        "offload what is made again",
        "layout.offload",
        ("mlp is computed again", "[mlp]"),
        "[attention]",
        {"recompute": ("mlp",), "offload": ("attention", "mlp")},
    ),
    Case(
        "offload of a layer made again",
        "layout.offload",
        ("nothing but each layer's input",),
        "[layer]",
        {"recompute": ("layer",), "offload": ("attention",)},
    ),
)
MODEL_CASES = (
    Case(
        "heads",
        "layout.tp",
        ("40 attention heads",),
        "8",
        {"tp": 16},
        {"num_attention_heads": 40},
        {"gpus_per_node": None},
    ),
    Case(
        "key/value heads",
        "layout.tp",
        ("8 key/value heads",),
        "8",
        {"tp": 12},
        {"num_attention_heads": 96, "intermediate_size": 12288},
        {"gpus_per_node": None, "seq_len": 4080},
    ),
    Case("width", "layout.tp", ("intermediate_size = 28673",), "1", spec={"intermediate_size": 28673}),
    Case("out of the node", "layout.tp", ("node of 8 GPUs", "tp_across_nodes"), "8", {"tp": 16}),
    Case("between nodes", "layout.tp", ("node of 6 GPUs",), "2", ONE | {"tp": 4, "pp": 3}, rest={"gpus_per_node": 6}),
    Case("stages", "layout.pp", ("81 stages", "80 layers"), "80", ONE | {"pp": 81}),
    Case("virtual stages", "layout.vpp", ("4 x 21 = 84", "80 layers"), "20", INTERLEAVED | {"vpp": 21}),
    Case("two a rank", "layout.vpp", ("32 x 3 = 96", "80"), "2", INTERLEAVED | {"pp": 32, "vpp": 3}),
    Case("ranks", "layout.pp", ("48 x 2 = 96", "80"), "40", INTERLEAVED | {"pp": 48}, rest={"global_batch": 96}),
    Case("list", "layout.layers", ("2 stages", "4 x 1 = 4"), "[20, 20, 20, 20]", {"layers": (40, 40)}),
    Case("sum", "layout.layers", ("79", "80 layers"), "[20, 20, 20, 20]", {"layers": (20, 20, 20, 19)}),
    Case("empty", "layout.layers", ("stage 1 has 0",), "[20, 20, 20, 20]", {"layers": (40, 0, 20, 20)}),
    Case("sequence", "data.seq_len", ("tp = 8", "sequence_parallel"), "4096", rest={"seq_len": 4095}),
    Case("slices", "data.seq_len", ("2 x 4 = 8",), "4088", {"tp": 1, "cp": 4}, rest={"seq_len": 4092}),
    Case("two slices", "data.seq_len", ("2 x 2 = 4",), "4092", {"tp": 1, "cp": 2}, rest={"seq_len": 4094}),
    Case("both", "data.seq_len", ("cp x tp = 2 x 4 = 8",), "4088", {"tp": 4, "cp": 2}, rest={"seq_len": 4092}),
    Case("positions", "data.seq_len", ("max_position_embeddings = 8192",), "8192", rest={"seq_len": 8200}),
    Case("window", "data.seq_len", ("sliding_window = 4090",), "4088", spec={"sliding_window": 4090}),
)
SIZE_CASES = (
    *(
        Case(axis, f"layout.{axis}", ("at least 1",), "1", {axis: 0})
        for axis in ("tp", "pp", "vpp", "cp", "dp", "micro_batch")
    ),
    Case("no batch", "train.global_batch", ("at least 1",), "1", rest={"global_batch": 0}),
    Case("negative sequence", "data.seq_len", ("at least 1",), "1", rest={"seq_len": -8}),
)


class TestRules:
    @pytest.mark.parametrize(
        ("layout", "spec", "rest"),
        [
            (GOOD, LLAMA_70B, {"world_size": 64}),
            (Layout(tp=3, pp=2, layers=(15, 15)), SMOL, {"world_size": 6, "seq_len": 1023, "global_batch": 2}),
            (replace(GOOD, tp=16, dp=1), LLAMA_70B, {"tp_across_nodes": True}),
            (replace(GOOD, tp=16, dp=1), LLAMA_70B, {"gpus_per_node": None}),
            (replace(GOOD, tp=8, sequence_parallel=False), LLAMA_70B, {"seq_len": 4095}),
            (replace(GOOD, vpp=5, schedule="interleaved", layers=(4,) * 20), LLAMA_70B, {"global_batch": 8}),
            (replace(GOOD, layers=()), LLAMA_70B, {}),
            (Layout(), LLAMA_70B, {"world_size": 1, "global_batch": 1, "seq_len": 1}),
        ],
    )
    def test_legal(self, layout: Layout, spec: ModelSpec, rest: dict[str, Any]) -> None:
        """Layouts that people run have no problem."""
        assert problems(layout, spec, **rest) == []

    @pytest.mark.parametrize("case", [*GRID_CASES, *MODEL_CASES, *SIZE_CASES], ids=lambda case: case.name)
    def test_broken(self, case: Case) -> None:
        """A layout that breaks one rule is told that rule, with both numbers and the nearest legal value."""
        (problem,) = problems(replace(GOOD, **case.layout), replace(LLAMA_70B, **case.spec), **case.rest)
        assert problem.key == case.key
        assert [word for word in case.words if word not in problem.rule] == []
        assert problem.nearest == case.nearest

    def test_several_at_once(self) -> None:
        """Rules that do not depend on each other are told together."""
        layout = replace(GOOD, tp=5, vpp=2, micro_batch=3, recompute=("layer", "mlp"), layers=(80,))
        told = {problem.key for problem in problems(layout, seq_len=9000)}
        assert told == {
            *("layout.tp", "layout.vpp", "train.global_batch", "layout.recompute", "layout.layers", "data.seq_len")
        }

    def test_nothing_fits(self) -> None:
        """Where no value is legal, none is proposed."""
        spec = replace(LLAMA_70B, max_position_embeddings=4)
        assert [problem.nearest for problem in problems(GOOD, spec, seq_len=4096)] == [None]


SPECS = st.builds(
    lambda group, kv, layers, ffn, limit, window: ModelSpec(
        1000, 64, ffn, layers, group * kv, kv, 16, max_position_embeddings=limit, sliding_window=window
    ),
    group=st.integers(1, 6),
    kv=st.integers(1, 6),
    layers=st.integers(1, 24),
    ffn=st.integers(1, 12).map(lambda n: 12 * n),
    limit=st.integers(96, 400),
    window=st.none() | st.integers(96, 400),
)
LAYOUTS = st.builds(
    Layout,
    tp=st.integers(1, 12),
    pp=st.integers(1, 6),
    vpp=st.integers(1, 3),
    cp=st.integers(1, 2),
    dp=st.integers(1, 4),
    micro_batch=st.integers(1, 3),
    sequence_parallel=st.booleans(),
    schedule=st.sampled_from(get_args(Schedule)),
    recompute=st.lists(st.sampled_from(get_args(Recompute)), max_size=3).map(tuple),
    layers=st.lists(st.integers(0, 8), max_size=6).map(tuple),
)


def advised(layout: Layout, seq_len: int, global_batch: int, problem: Problem) -> tuple[Layout, int, int]:
    """The run after one problem's nearest legal value was written into it."""
    assert problem.nearest is not None
    section, _, name = problem.key.partition(".")
    if problem.key == "data.seq_len":
        return layout, int(problem.nearest), global_batch
    if problem.key == "train.global_batch":
        return layout, seq_len, int(problem.nearest)
    assert section == "layout"
    words = problem.nearest.strip("[]").split(", ")
    value: Any = {"layers": tuple(map(int, words)) if name == "layers" else None, "recompute": tuple(words)}.get(name)
    new: dict[str, Any] = {name: value or (problem.nearest if name == "schedule" else int(problem.nearest))}
    if name in ("pp", "vpp"):
        new["layers"] = ()
    return replace(layout, **new), seq_len, global_batch


class TestAgainstWhatRuns:
    @given(
        spec=SPECS,
        layout=LAYOUTS,
        seq_len=st.integers(1, 500),
        global_batch=st.integers(1, 64),
        node=st.sampled_from([None, 4, 6, 8]),
    )
    def test_advice_leads_to_a_legal_layout(
        self, spec: ModelSpec, layout: Layout, seq_len: int, global_batch: int, node: int | None
    ) -> None:
        """Whoever follows the nearest legal values, first problem first, arrives at a layout without problems."""
        for _ in range(20):
            told = problems(layout, spec, seq_len=seq_len, global_batch=global_batch, gpus_per_node=node)
            if not told:
                return
            layout, seq_len, global_batch = advised(layout, seq_len, global_batch, told[0])
        pytest.fail(f"still wrong: {told[0]}")

    @given(layout=LAYOUTS, node=st.integers(1, 12))
    def test_node_rule_is_the_grid(self, layout: Layout, node: int) -> None:
        """A layout is refused for leaving its node exactly when a group of the grid spans two nodes."""
        told = problems(replace(layout, layers=()), gpus_per_node=node)
        refused = any("would leave its node" in problem.rule for problem in told)
        assert refused == bool(layout.groups_crossing_nodes("tp", node))

    @given(layout=LAYOUTS, global_batch=st.integers(1, 64))
    def test_batch_rules_are_the_schedule(self, layout: Layout, global_batch: int) -> None:
        """What is legal here can be built as a schedule, and what cannot be built is refused."""
        assume(global_batch % (layout.micro_batch * layout.dp) == 0)
        keys = ("layout.schedule", "layout.vpp", "train.global_batch")
        layout = replace(layout, layers=(), recompute=())
        told = [problem for problem in problems(layout, global_batch=global_batch) if problem.key in keys]
        unbuilt = schedule_problems(layout.schedule, layout.pp, layout.vpp, layout.micro_batches(global_batch))
        assert not (unbuilt and not told)
        pointless = layout.pp == 1 or (layout.schedule == "interleaved" and layout.vpp == 1)
        assert pointless or bool(told) == bool(unbuilt)

    @given(spec=SPECS, layout=LAYOUTS)
    def test_heads_of_every_rank(self, spec: ModelSpec, layout: Layout) -> None:
        """On a legal layout every rank holds equal whole heads, and whole key/value heads that they read."""
        told = problems(layout, spec, gpus_per_node=None)
        if any(problem.key == "layout.tp" for problem in told):
            return
        tp, heads, kv_heads = layout.tp, spec.num_attention_heads, spec.num_key_value_heads
        for rank in range(tp):
            mine = range(rank * heads // tp, (rank + 1) * heads // tp)
            read = {head // (heads // kv_heads) for head in mine}
            assert len(mine) * tp == heads
            assert len(read) == max(1, kv_heads // tp)


class TestLayerMaps:
    @pytest.mark.parametrize("vocab_size", [1, 300, 1000, 10000])
    @pytest.mark.parametrize("num_layers", range(1, 9))
    def test_balanced_is_the_best(self, num_layers: int, vocab_size: int) -> None:
        """No other map of the layers has a faster slowest stage, or is more even with one as fast."""
        spec = ModelSpec(vocab_size, 64, 128, num_layers, 4, 4, 16)
        head = spec.head_flops_per_token() / spec.layer_flops_per_token(128, causal=True)
        for num_stages in range(1, min(num_layers, 4) + 1):
            maps = compositions(num_layers, num_stages)
            slowest = {layers: max(*layers[:-1], layers[-1] + head, 0) for layers in maps}
            best = min(slowest.values())
            chosen = balanced_layers(spec, num_stages, 128)
            assert slowest[chosen] == pytest.approx(best)
            rivals = [layers for layers in maps if slowest[layers] <= best + 1e-9]
            assert sum(n * n for n in chosen) == min(sum(n * n for n in layers) for layers in rivals)
            assert list(chosen[:-1]) == sorted(chosen[:-1], reverse=True)

    @given(num_layers=st.integers(1, 100), num_stages=st.integers(1, 16))
    def test_even(self, num_layers: int, num_stages: int) -> None:
        """Even maps hold every layer once, differ by one at most, and put the longer stages first."""
        layers = even_layers(num_layers, num_stages)
        assert sum(layers) == num_layers
        assert max(layers) - min(layers) <= 1
        assert list(layers) == sorted(layers, reverse=True)


KERNEL_CASES = (
    ("flash", {}, {}, {"dtype": "float32"}, "computes in 16 bits, and model.dtype is float32"),
    ("cudnn", {}, {}, {"dtype": "float32"}, "computes in 16 bits, and model.dtype is float32"),
    ("cudnn", {}, {}, {"packing": True}, "has no kernel for packed documents, and data.packing is true"),
    ("cudnn", {}, {}, {"deterministic": True}, "as runtime.deterministic wants it"),
    ("cudnn", {"head_dim": 256}, {}, {}, "at most 128 that are multiples of 8; the model's have 256"),
    ("cudnn", {"head_dim": 100}, {}, {}, "at most 128 that are multiples of 8; the model's have 100"),
    ("flash", {"head_dim": 320}, {}, {}, "heads of at most 256; the model's have 320"),
    ("flash", {"head_dim": 100}, {}, {"packing": True}, "multiples of 8 where data.packing is true"),
    ("flash", {"head_dim": 100}, {"cp": 2}, {}, "multiples of 8 where layout.cp is 2"),
    ("efficient", {"head_dim": 100}, {}, {}, "multiples of 8; the model's have 100"),
    ("efficient", {}, {"cp": 2}, {}, "layout.cp = 2 could add up"),
)
RUN = {"dtype": "bfloat16", "packing": False, "deterministic": False}


class TestKernels:
    """What a kernel of attention that is asked for by name cannot compute."""

    @pytest.mark.parametrize(("kernel", "spec", "layout", "run", "words"), KERNEL_CASES)
    def test_refused(self, kernel: str, spec: dict, layout: dict, run: dict, words: str) -> None:
        """One message with what is in the way and a kernel that computes everything; `auto` and `math` do."""
        asked = replace(LLAMA_70B, **spec), replace(GOOD, **layout)
        (problem,) = attention_problems(*asked, kernel, **RUN | run)
        assert words in problem.rule
        assert (problem.key, problem.value, problem.nearest) == ("model.attention", kernel, "auto")
        for able in ("auto", "math"):
            assert not attention_problems(*asked, able, **RUN | run)

    @pytest.mark.parametrize(
        ("kernel", "layout", "run"),
        [
            ("flash", {}, {"packing": True, "deterministic": True}),
            ("flash", {"cp": 2}, {"packing": True}),
            ("cudnn", {"cp": 2}, {}),
            ("efficient", {}, {"dtype": "float32", "packing": True, "deterministic": True}),
        ],
    )
    def test_legal(self, kernel: str, layout: dict, run: dict) -> None:
        """A kernel that can is let through: `efficient` with grouped heads too, whose keys are repeated for it."""
        assert not attention_problems(LLAMA_70B, replace(GOOD, **layout), kernel, **RUN | run)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to write `total` as `parts` positive numbers in order."""
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(1, total - parts + 2) for rest in compositions(total - first, parts - 1)]
