"""The configurations of `bench/campaign.py`: drawn by seed, legal, small enough for one GPU or two, told in JSON.

Five groups. `pick`: one model and batch in every layout of two GPUs that the planner itself considers. `drawn`: random
layouts of two GPUs, and of one. `host`: runs of one GPU that wait for their host. `rank`: ranks of bigger grids, each
alone on one GPU. `grid`: both ranks of some pipelines of `pick`, alone, so that the step of the pair can be put
together from one GPU and held against the pair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from triweave.catalogue import find_model
from triweave.cluster import GIB, Cluster, parse_cluster
from triweave.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.errors import InputError
from triweave.layout import Coordinates, Layout, balanced_layers, even_layers
from triweave.model_spec import ModelSpec, RopeScaling
from triweave.planner.memory import predict_memory
from triweave.planner.request import Request
from triweave.planner.space import RECOMPUTE, layouts
from triweave.rules import layout_problems

Group = Literal["pick", "drawn", "host", "rank", "grid"]
GPU = "h200-141gb"
MODELS = (
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-2-13b",
    "llama-3.1-70b",
    "llama-3.1-405b",
)
RATE = 500e12
"""Model FLOP/s of a GPU, about: sizes the draws so that steps take what is wanted. Nothing is predicted with it."""
STEP_S = (0.15, 0.8)
HOST_MODELS, HOST_SEQ, HOST_STEP_S = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"), (512, 1024, 2048), (0.01, 0.2)
"""Of steps that wait for their host: layers so small that issuing them takes longer."""
MEMORY_GIB = (6.0, 105.0)
TINY = ModelSpec(512, 64, 128, 8, 8, 8, 8, max_position_embeddings=8192)
GRID_SCHEDULES = (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 1), ("1f1b", 2))
"""Schedules and micro-batch sizes of `pick` whose ranks are run alone as well."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    name: str
    group: Group
    model: str
    spec: ModelSpec
    layout: Layout
    seq_len: int
    global_batch: int
    rank: int | None = None
    """The rank that runs alone; None where the whole grid runs."""
    expandable: bool = True
    """Whether the allocator has expandable segments."""
    of: str = ""
    """The case whose rank this is."""

    @property
    def on_two(self) -> bool:
        """Whether it takes a pair of GPUs."""
        return self.rank is None and self.layout.world_size == 2

    @property
    def axis(self) -> str:
        """Along which its ranks are spread; `tp` where there is one."""
        return max(("tp", "pp", "dp"), key=self.layout.size)

    @property
    def cluster(self) -> Cluster:
        """As many GPUs as the grid has ranks."""
        per_node = min(8, self.layout.world_size)
        return parse_cluster(f"{self.layout.world_size // per_node}x{per_node}x{GPU}")

    @property
    def resolved(self) -> ResolvedRun:
        """The run: bf16, plain causal sequences, random weights."""
        run = Run(
            model=ModelConfig(path=self.model, weights="random"),
            data=DataConfig(train=("",), seq_len=self.seq_len, packing=False),
            optimizer=OptimizerConfig(learning_rate=1e-6),
            train=TrainConfig(global_batch=self.global_batch, steps=1),
        )
        count = self.layout.micro_batches(self.global_batch)
        return ResolvedRun(run, self.spec, self.layout, self.cluster, count, self.cluster.gpus_per_node)

    @property
    def words(self) -> str:
        """The configuration on one line."""
        layout = self.layout
        parts = [
            f"{self.model} {self.spec.num_hidden_layers} layers",
            str(layout),
            *([layout.schedule] if layout.pp > 1 else []),
            *([layout.shard] if layout.dp > 1 else []),
            *(["no sp"] if layout.tp > 1 and not layout.sequence_parallel else []),
            "+".join(layout.recompute),
            "/".join(map(str, layout.layers)) if len(set(layout.layers)) > 1 else "",
            f"seq {self.seq_len}",
            f"{layout.micro_batches(self.global_batch)} x {layout.micro_batch}",
            "" if self.expandable else "no expandable segments",
            "" if self.rank is None else f"rank {self.rank}",
        ]
        return ", ".join(part for part in parts if part)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def from_json(told: dict[str, Any]) -> Case:
    """The inverse of `to_json`."""
    scaling = told["spec"]["rope_scaling"]
    spec = ModelSpec(**{**told["spec"], "rope_scaling": RopeScaling(**scaling) if scaling else None})
    lists = {key: tuple(told["layout"][key]) for key in ("recompute", "layers")}
    return Case(**{**told, "spec": spec, "layout": Layout(**{**told["layout"], **lists})})


def draw_cases(seed: int, *, small: bool, times_only: bool = False) -> list[Case]:
    """Every configuration of a campaign in the order in which it is run; `small` ones are for a rehearsal on a CPU.

    Those that the planner prices take turns by axis, so that a run that is cut has some of each; `times_only` leaves
    out the ranks that run alone, which come last in the draw: the others are the same.
    """
    rng = random.Random(seed)  # noqa: S311 - configurations, no secret
    picks = [replace(case, name=f"pick-{number:02}") for number, case in enumerate(pick_cases(small))]
    pairs = _drawn(4 if small else 22, "pair", lambda: draw_pair(rng, small))
    ones = _drawn(1 if small else 10, "one", lambda: draw_one(rng, small))
    if small:
        picks = picks[::6]
    # Of numbers of its own, so that the other draws of a seed stay what they were.
    waiting = random.Random(f"{seed} host")  # noqa: S311 - configurations, no secret
    hosts = _drawn(1 if small else 8, "host", lambda: draw_waiting(waiting, small))
    whole = [*ones, *by_turns([*picks, *pairs]), *hosts]
    if times_only:
        return whole
    ranks = _drawn(3 if small else 12, "rank", lambda: draw_rank(rng, small))
    return [*whole, *ranks, *grid_cases(picks)]


def by_turns(cases: list[Case]) -> list[Case]:
    """Tensor, pipeline and data parallel in turn, for each axis in the order given."""
    ahead = dict.fromkeys(("tp", "pp", "dp"), 0)
    totals = {axis: sum(case.axis == axis for case in cases) for axis in ahead}

    def place(case: Case) -> float:
        ahead[case.axis] += 1
        return ahead[case.axis] / (1 + totals[case.axis])

    return sorted(cases, key=place)


def pick_cases(small: bool) -> Iterator[Case]:
    """Every layout of two GPUs that the planner's search considers for one model and batch, nothing recomputed.

    At most two sequences a micro-batch and two virtual stages a rank: more were never faster, and time is short.
    """
    spec = TINY if small else replace(find_model("llama-3.1-8b"), num_hidden_layers=8)
    model = "tiny" if small else "llama-3.1-8b"
    seq, batch = (64, 8) if small else (4096, 8)
    cluster = f"1x2x{GPU}"
    request = Request(model, cluster, spec, parse_cluster(cluster), seq, batch)
    considered = list(layouts(request))
    # The search leaves `none` out, for it is `optimizer` with more memory and the same traffic: seen here if it is so.
    considered += [replace(layout, shard="none") for layout in considered if layout.dp > 1 and layout.shard == "full"]
    for layout in considered:
        if layout.micro_batch > 2 or layout.vpp > 2 or layout.cp > 1 or layout.shard_group is not None:
            continue
        if not _illegal(spec, layout, seq, batch):
            yield Case("", "pick", model, spec, layout, seq, batch)


def grid_cases(picks: list[Case]) -> Iterator[Case]:
    """Both ranks of some pipelines, each to run alone."""
    found: dict[tuple[str, int], Case] = {}
    for case in picks:
        if case.layout.pp > 1:
            found.setdefault((case.layout.schedule, case.layout.micro_batch), case)
    for key in GRID_SCHEDULES:
        if key in found:
            case = found[key]
            for rank in (0, 1):
                yield replace(case, name=f"{case.name}-rank-{rank}", group="grid", rank=rank, of=case.name)


def _drawn(count: int, name: str, draw: Callable[[], Case | None]) -> list[Case]:
    found: list[Case] = []
    while len(found) < count:
        case = draw()
        if case is not None:
            found.append(replace(case, name=f"{name}-{len(found):02}"))
    return found


def draw_pair(rng: random.Random, small: bool) -> Case | None:
    """A layout of two GPUs; None if it is not legal or of no good size."""
    axis = rng.choice(["tp", "tp", "pp", "pp", "dp", "dp"])
    schedule = rng.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"]) if axis == "pp" else "1f1b"
    layout = Layout(
        tp=2 if axis == "tp" else 1,
        pp=2 if axis == "pp" else 1,
        dp=2 if axis == "dp" else 1,
        vpp=rng.choice([2, 3]) if schedule == "interleaved" else 1,
        micro_batch=rng.choice([1, 1, 2, 4]),
        sequence_parallel=rng.random() < 0.85,
        schedule=schedule,
        shard=rng.choice(["none", "optimizer", "gradients", "full"]) if axis == "dp" else "optimizer",
        recompute=_recompute(rng),
    )
    return _sized(rng, layout, "drawn", small, rank=None)


def draw_one(rng: random.Random, small: bool) -> Case | None:
    """A run of one GPU."""
    layout = Layout(micro_batch=rng.choice([1, 2, 4]), recompute=_recompute(rng))
    return _sized(rng, layout, "drawn", small, rank=None)


def draw_waiting(rng: random.Random, small: bool) -> Case | None:
    """A run of one GPU whose layers are so small that it waits for the host."""
    layout = Layout(micro_batch=1, recompute=_recompute(rng))
    return _sized(rng, layout, "host", small, rank=None, models=HOST_MODELS, sequences=HOST_SEQ, within_s=HOST_STEP_S)


def draw_rank(rng: random.Random, small: bool) -> Case | None:
    """A rank of a bigger grid, to run alone."""
    pp = rng.choice([1, 2, 4, 8])
    schedule = rng.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"]) if pp > 1 else "1f1b"
    layout = Layout(
        tp=rng.choice([1, 2, 4, 8]),
        pp=pp,
        vpp=2 if schedule == "interleaved" else 1,
        dp=rng.choice([1, 1, 2, 4, 8]),
        micro_batch=rng.choice([1, 1, 2]),
        sequence_parallel=rng.random() < 0.85,
        schedule=schedule,
        shard=rng.choice(["none", "optimizer", "gradients", "full"]),
        recompute=_recompute(rng),
    )
    rank = layout.rank(Coordinates(rng.randrange(layout.tp), 0, rng.randrange(layout.dp), rng.randrange(pp)))
    if layout.world_size < 4:
        return None
    return _sized(rng, layout, "rank", small, rank=rank)


def _recompute(rng: random.Random) -> Any:
    return rng.choice([(), (), (), *RECOMPUTE[1:]])


def _sized(
    rng: random.Random,
    layout: Layout,
    group: Group,
    small: bool,
    *,
    rank: int | None,
    models: tuple[str, ...] = MODELS,
    sequences: tuple[int, ...] = (1024, 2048, 4096, 8192),
    within_s: tuple[float, float] = STEP_S,
) -> Case | None:
    """The layout with a model, a sequence and a batch that make its step neither short nor long, and fit."""
    name = "tiny" if small else rng.choice(models)
    a_stage, seq = rng.choice([2, 3, 4, 6, 8, 12, 16]), rng.choice(sequences)
    balanced, count = rng.random() < 0.3, rng.choice([1, 2, 4, 8]) * layout.pp
    expandable = rng.random() < 0.75
    spec = TINY if small else replace(find_model(name), max_position_embeddings=8192)
    num_layers = min(a_stage * layout.num_stages, 2 * layout.num_stages if small else spec.num_hidden_layers)
    if small:
        seq, count = 64, layout.pp
    spec = replace(spec, num_hidden_layers=num_layers)
    spread = balanced_layers(spec, layout.num_stages, seq) if balanced else even_layers(num_layers, layout.num_stages)
    layout = replace(layout, layers=spread)
    batch = count * layout.dp * layout.micro_batch
    case = Case("", group, name, spec, layout, seq, batch, rank, expandable)
    if min(spread) < 1 or _illegal(spec, layout, seq, batch):
        return None
    if small:
        return case
    step_s = batch * seq * spec.flops_per_token(seq, causal=True) / layout.world_size / RATE
    if not within_s[0] <= step_s <= within_s[1]:
        return None
    stages = predict_memory(spec, layout, seq_len=seq, num_micro_batches=count)
    used = [stage.used_bytes / GIB for stage in stages]
    if rank is not None:
        used = [used[layout.coordinates(rank).pp]]
    return case if min(used) >= MEMORY_GIB[0] and max(used) <= MEMORY_GIB[1] else None


def _illegal(spec: ModelSpec, layout: Layout, seq: int, batch: int) -> bool:
    try:
        per_node = min(8, layout.world_size)
        return bool(
            layout_problems(
                spec, layout, world_size=layout.world_size, seq_len=seq, global_batch=batch, gpus_per_node=per_node
            )
        )
    except InputError:
        return True
