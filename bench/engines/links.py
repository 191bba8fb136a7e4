"""Steps over links at full speed, a tenth and a hundredth, with tensor parallelism inside hosts and across them.

The prediction is made by the functions of `triweave plan`, from a cluster file (hosts, ranks of a host, speed of its
link) and a machine profile. That holds the products of the card which ranks stand in for (`card.py`), and what was
measured of links as `triweave probe` does it (`speeds.py`): sums in a host and latencies at full speed, and which share
of a link's speed messages reach, at a tenth. For the prediction nothing is measured at a hundredth, and no step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hosts import Hosts
from job import document, make_files, over_hosts, write_run

from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.planner.ask import given_layout, make_request
from triweave.planner.profile import CollectiveCurve, LinkCurve, MatmulTable, Point, Profile, profile_text
from triweave.planner.time_step import StepTime, predict_step
from triweave.planner.time_trainer import TRIWEAVE
from triweave.probe.shapes import linear_layers, products_of

HOSTS, PER_HOST = 4, 2
SEQ, HIDDEN, LAYERS, MICRO_BATCHES, STEPS = 512, 256, 4, 6, 5
ACTIVATION = 2 * SEQ * HIDDEN
LEFT_OUT = 1
"""Steps at each speed that do not count: in the first connections are made, or the links change."""
CARD = "a100-pcie-40gb"
"""The catalogue's name of a card of which the planner knows no speeds: all of them come from the profile."""
FLOPS = 2e9
"""A second, of that card."""

GLOO = replace(TRIWEAVE, name="triweave on gloo", rings=True, links=1.0, slowdown=0.0)
"""The trainer on CPUs: sums are rings of all ranks, reach the full speed of links, and cost products nothing."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A layout of the eight ranks."""

    name: str
    keys: Mapping[str, Any]

    @property
    def words(self) -> str:
        """For `--layout`."""
        return ",".join(f"{key}={str(value).lower()}" for key, value in self.keys.items())


GRIDS = (
    Grid("tp 2 in a host, pp 4", {"tp": 2, "pp": 4, "sequence_parallel": False}),
    Grid("tp 4 on two hosts, pp 2", {"tp": 4, "pp": 2, "sequence_parallel": False, "tp_across_nodes": True}),
)


@dataclass(frozen=True, slots=True)
class Links:
    """What was measured of links at one speed."""

    host: tuple[Point, ...]
    """Sums over the ranks of a host."""
    pairs: tuple[Point, ...]
    """Sums over a rank of each of two hosts."""
    message: tuple[Point, ...]
    """Messages between two hosts, all ranks of the host at once."""

    @property
    def within_bytes_per_s(self) -> float:
        """An activation summed inside a host, on the bus: 2(n - 1)/n of its bytes in that time."""
        seconds = dict(self.host)[ACTIVATION]
        return 2 * (PER_HOST - 1) / PER_HOST * ACTIVATION / seconds

    @property
    def across_bytes_per_s(self) -> float:
        """Of a host's link, by the larger message."""
        (_, latency), (size, seconds) = self.message
        return PER_HOST * size / (seconds - latency)


def steps(hosts: Hosts, folder: Path) -> Iterator[str]:
    """A row for each layout and each speed of the links."""
    make_files(folder, hidden=HIDDEN, layers=LAYERS, heads=4, seq=SEQ, lines=64)
    shape(hosts, None)
    full = look(hosts, folder)
    tenth = full.within_bytes_per_s / 10
    shape(hosts, tenth)
    share = look(hosts, folder).across_bytes_per_s / tenth
    write_profile(folder, full, tenth, share)
    yield (
        f"An activation of {ACTIVATION >> 10} KiB is summed inside a host at {full.within_bytes_per_s / 1e6:.0f} MB/s;"
        f" a host's link carries {full.across_bytes_per_s / 1e6:.0f} MB/s, and of a shaped one {100 * share:.0f} %.\n"
    )
    yield "| layout | links, Mbit/s | step measured, s | least to most, s | predicted, s | off | of it tp, s | pp, s |"
    yield "|---|---|---|---|---|---|---|---|"
    rates = [None, tenth, tenth / 10]
    for grid in GRIDS:
        for rate, times in zip(rates, measured(hosts, folder, grid, rates), strict=True):
            told = predicted(folder, grid, rate or full.across_bytes_per_s / share)
            step = statistics.median(times)
            off = 100 * (told.step_s / step - 1)
            parts = f"{told.breakdown.tensor_parallel:.2f} | {told.breakdown.pipeline:.2f}"
            span = f"{min(times):.2f} to {max(times):.2f}"
            speed = "full" if rate is None else f"{8e-6 * rate:.0f}"
            yield f"| {grid.name} | {speed} | {step:.3f} | {span} | {told.step_s:.3f} | {off:+.1f} % | {parts} |"
    shape(hosts, None)


def shape(hosts: Hosts, bytes_per_s: float | None) -> None:
    """Slow every host's link."""
    for number in range(1, HOSTS + 1):
        hosts.shape(f"h{number}", None if bytes_per_s is None else 8e-6 * bytes_per_s)


def look(hosts: Hosts, folder: Path) -> Links:
    """The links as they are shaped now."""
    program = (str(Path(__file__).parent / "speeds.py"), str(ACTIVATION))
    code, said = over_hosts(hosts, PER_HOST, (), folder, "speeds", program=program)
    if code != 0:
        raise RuntimeError(said[-1000:])
    found = {key: tuple((size, seconds) for size, seconds in points) for key, points in document(said).items()}
    return Links(**found)


def write_profile(folder: Path, full: Links, port: float, share: float) -> None:
    """The card's products and the links, as a profile that `--profile` takes.

    Args:
        folder: of the model, and where the profile goes.
        full: links at full speed.
        port: bytes a second of a host's link that messages were held against.
        share: of it that they reached.
    """
    latency = full.message[0][1]
    profile = Profile(
        version=2,
        gpu=CARD,
        torch="",
        date="",
        source="bench/engines/links.py: products of a stand-in card, links of network namespaces",
        num_gpus=PER_HOST,
        nic_gbit_per_s=8e-9 * port / PER_HOST,
        matmul=tables(spec_from_folder(folder / "model")),
        collectives=(
            CollectiveCurve("all_reduce", PER_HOST, "node", full.host),
            CollectiveCurve("all_reduce", 2, "cluster", full.pairs),
        ),
        point_to_point=(LinkCurve("cluster", ((4, latency), (ACTIVATION, ACTIVATION * PER_HOST / (share * port)))),),
    )
    (folder / "profile.yaml").write_text(profile_text(profile), encoding="utf-8")


def tables(spec: ModelSpec) -> tuple[MatmulTable, ...]:
    """Every product of both layouts, at the card's speed."""
    found = {
        one
        for grid in GRIDS
        for out, inner, _ in linear_layers(spec, grid.keys["tp"])
        for one in products_of(SEQ, out, inner)
    }
    return tuple(
        MatmulTable(
            "bf16",
            operands,
            tuple(sorted((one.m, one.n, one.k, one.flops / FLOPS) for one in found if one.operands == operands)),
        )
        for operands in ("NT", "NN", "TN")
    )


def measured(hosts: Hosts, folder: Path, grid: Grid, rates: Sequence[float | None]) -> list[list[float]]:
    """Seconds of steps at each speed of the links, which are shaped while the run goes on.

    Raises:
        RuntimeError: the run failed.
    """
    name = f"tp{grid.keys['tp']}"
    run = write_run(
        folder,
        name,
        model={"dtype": "bfloat16"},
        data={"seq_len": SEQ, "packing": False},
        layout=grid.keys,
        train={"steps": STEPS * len(rates), "global_batch": MICRO_BATCHES},
    )
    metrics = folder / name / "metrics.jsonl"

    def reshape(running: Callable[[], bool]) -> None:
        for number, rate in enumerate(rates):
            while running() and len(lines_of(metrics)) < number * STEPS:
                time.sleep(0.05)
            shape(hosts, rate)

    shape(hosts, rates[0])
    card = (str(Path(__file__).parent / "card.py"), "profile.yaml")
    code, said = over_hosts(hosts, PER_HOST, ("train", run.name), folder, "train", program=card, meanwhile=reshape)
    if code != 0:
        raise RuntimeError(said[-1000:])
    times = [json.loads(line)["step_s"] for line in lines_of(metrics)]
    return [times[first + LEFT_OUT : first + STEPS] for first in range(0, len(times), STEPS)]


def lines_of(path: Path) -> list[str]:
    """Of a file that may not be there yet."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def predicted(folder: Path, grid: Grid, bytes_per_s: float) -> StepTime:
    """What `triweave plan` prices a step with, for a cluster of such links."""
    gpu = {"name": CARD, "nic_gbit_per_s": 8e-9 * bytes_per_s}
    cluster = {"nodes": HOSTS, "gpus_per_node": PER_HOST, "rails": 1, "gpu": gpu}
    (folder / "cluster.yaml").write_text(json.dumps(cluster), encoding="utf-8")
    request = make_request(
        str(folder / "model"),
        str(folder / "cluster.yaml"),
        SEQ,
        MICRO_BATCHES,
        profile=str(folder / "profile.yaml"),
    )
    layout = given_layout(request, grid.words)
    return predict_step(
        request.spec, layout, request.cluster, seq_len=SEQ, global_batch=MICRO_BATCHES, stack=GLOO, on=request.on
    )
