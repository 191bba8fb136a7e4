"""A probe of this machine: the parts, most useful first, each kept as soon as it is measured."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from triweave.config.schema import RuntimeConfig
from triweave.errors import InputError, Problem, closest
from triweave.groups import Group
from triweave.planner.profile import Profile
from triweave.probe import file
from triweave.probe.attention import measure_attention
from triweave.probe.beside import measure_slowdowns
from triweave.probe.copies import measure_copies
from triweave.probe.hosts import measure_hosts, measure_launch
from triweave.probe.identity import identify, sm_clock_mhz
from triweave.probe.layers import measure_layers
from triweave.probe.links import measure_collectives, measure_host_copies, measure_messages
from triweave.probe.operations import measure_operations, memory_curve
from triweave.probe.products import measure_fp8_products, measure_power, measure_products
from triweave.probe.session import Session, Tell, tell_nothing
from triweave.probe.soak import Mixture
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group

HANG_S = 150.0
"""Without a sign of progress: a GPU that waits for a flag or a peer cannot be interrupted."""

Found = dict[str, Any]
"""Fields of a profile with what was measured."""


class Part(NamedTuple):
    """What is measured in one go and kept together."""

    name: str
    measure: Callable[[Session], Found]
    among_ranks: bool = False
    """Whether it takes two ranks or more."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    out: Path
    only: tuple[str, ...] = ()
    """Names of parts; empty for all."""
    minutes: float = 10.0
    device: str = "auto"
    name: str | None = None
    """What the GPU counts as in the catalogue, where that is not seen from its own name."""
    force: bool = False
    speaks: bool = True
    """Whether progress is shown."""


def _products(session: Session) -> Found:
    burst, steady = measure_power(session)
    tables = measure_products(session)
    if session.on_gpu:
        # As many as the queue holds, so that they still run when the driver answers.
        Mixture(session).issue(1.5)
    clock = sm_clock_mhz(session.device)
    rates = {"burst_tflops": burst, "back_to_back_tflops": steady}
    return {"matmul": tables, "sustained_sm_clock_mhz": clock, **rates}


def _operations(session: Session) -> Found:
    curves = measure_operations(session)
    return {"operations": curves, "memory_bytes_seconds": memory_curve(curves)}


def _links(session: Session) -> Found:
    return {"collectives": measure_collectives(session), "point_to_point": measure_messages(session)}


def _host(session: Session) -> Found:
    copies, launch_s = measure_host_copies(session), measure_launch(session)
    return {"host_copy_bytes_seconds": copies, "launch_seconds": launch_s, "hosts": measure_hosts(session)}


def _fp8(session: Session) -> Found:
    return {"matmul": measure_fp8_products(session)} if session.has_fp8 else {}


PARTS = (
    Part("gemm", _products),
    Part("attention", lambda session: {"attention": measure_attention(session)}),
    Part("memory", _operations),
    Part("links", _links, among_ranks=True),
    Part("copies", lambda session: {"copies": measure_copies(session)}, among_ranks=True),
    Part("overlap", lambda session: {"slowdowns": measure_slowdowns(session)}, among_ranks=True),
    Part("layers", lambda session: {"layers": measure_layers(session)}),
    Part("host", _host),
    Part("fp8", _fp8),
)


def chosen_parts(names: Sequence[str]) -> tuple[Part, ...]:
    """The parts of `--only`, in the order in which they are measured.

    Raises:
        InputError: a name that is none.
    """
    known = [part.name for part in PARTS]
    wrong = [name for name in names if name not in known]
    if wrong:
        rule = f"is none of {', '.join(known)}"
        raise InputError(Problem("--only", name, rule, closest(name, known)) for name in wrong)
    return tuple(part for part in PARTS if not names or part.name in names)


def device_of(options: Options, process: Process) -> torch.device:
    """This rank's device.

    Raises:
        InputError: there are not as many GPUs as ranks, or none and the CPU was not asked for.
    """
    if options.device != "cpu" and torch.version.cuda is None:
        rule = f"needs a PyTorch that was built for GPUs; {torch.__version__} is not. A rehearsal runs on the CPU"
        raise InputError(Problem("--device", options.device, rule, "cpu"))
    wanted = "cpu" if options.device == "cpu" else "cuda"
    try:
        return choose_device(RuntimeConfig(device="cpu" if wanted == "cpu" else "cuda"), process)
    except InputError:
        found, needed = torch.cuda.device_count(), process.local_world_size
        if found:
            raise InputError(
                Problem("--nproc", needed, f"is more than the {found} GPUs of this host", str(found))
            ) from None
        rule = "needs a GPU, and there is none here. A rehearsal runs on the CPU"
        raise InputError(Problem("--device", options.device, rule, "cpu")) from None


def probe(options: Options, process: Process) -> int:
    """Measure on this rank; rank 0 keeps the profile. Returns 0, or 1 if the time was over before all was measured.

    Raises:
        InputError: the machine is not what the options say, or the file is not to be written.
    """
    parts = chosen_parts(options.only)
    if process.world_size != process.local_world_size:
        rule = f"is more than the {process.local_world_size} of this host; a probe measures one node"
        raise InputError(Problem("WORLD_SIZE", process.world_size, rule, str(process.local_world_size)))
    device = device_of(options, process)
    mine = file.held(options.out) if process.rank == 0 else nullcontext()
    with mine, process_group(process, device, 300), _Watchdog() as watchdog, _progress(options, process) as tell:
        session = _session(options, process, device, watchdog.seen(tell))
        machine = identify(device, process.world_size, options.name)
        profile = file.begin(options.out, machine, force=options.force)
        session.meet()  # nobody writes before all have read
        for part in parts:
            if part.name in profile.parts or (part.among_ranks and process.world_size == 1):
                continue
            if session.is_late():
                break
            session.tell(part.name, 0.0)
            profile = kept(profile, part, part.measure(session))
            if process.rank == 0:
                file.write(options.out, profile)
            _free(session)
    return 0 if not missing(profile, parts) else 1


def missing(profile: Profile, parts: Sequence[Part]) -> list[str]:
    """Parts that this machine can measure and the profile does not hold."""
    alone = profile.num_gpus < 2
    return [part.name for part in parts if part.name not in profile.parts and not (part.among_ranks and alone)]


def kept(profile: Profile, part: Part, found: Found) -> Profile:
    """The profile with what a part found, tables beside those of other parts."""
    together = {"matmul": (*profile.matmul, *found["matmul"])} if "matmul" in found else {}
    return replace(profile, **(found | together), parts=(*profile.parts, part.name))


def _session(options: Options, process: Process, device: torch.device, tell: Tell) -> Session:
    world = Group(tuple(range(process.world_size)), process.rank, dist.group.WORLD if process.world_size > 1 else None)
    deadline = time.monotonic() + 60 * options.minutes
    torch.manual_seed(process.rank)
    session = Session(world, device, device.type != "cuda", deadline, tell)
    count = 2
    while count <= process.world_size:
        ranks = tuple(range(count))
        handle = dist.group.WORLD if count == process.world_size else dist.new_group(list(ranks))
        if process.rank in ranks:
            session.groups[count] = Group(ranks, process.rank, handle)
        count *= 2
    return session


def _free(session: Session) -> None:
    gc.collect()
    if session.on_gpu:
        torch.cuda.empty_cache()


@dataclass(slots=True)
class _Watchdog:
    """Ends this rank when nothing has moved for `HANG_S`; what was kept stays."""

    deadline_s: float = field(default_factory=lambda: time.monotonic() + HANG_S)
    part: str = "start"

    def __enter__(self) -> _Watchdog:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.deadline_s = float("inf")

    def seen(self, tell: Tell) -> Tell:
        """The same, noticed here."""

        def noticed(what: str, done: float) -> None:
            self.part, self.deadline_s = what, time.monotonic() + HANG_S
            tell(what, done)

        return noticed

    def _watch(self) -> None:
        while time.monotonic() < self.deadline_s:
            time.sleep(0.5)
        if self.deadline_s != float("inf"):
            print(f"error: {self.part}: nothing has moved for {HANG_S:.0f} s", file=sys.stderr, flush=True)
            os._exit(1)


@contextmanager
def _progress(options: Options, process: Process) -> Iterator[Tell]:
    """A bar on a terminal, a line a part elsewhere; rank 0 speaks alone."""
    if process.rank != 0 or not options.speaks:
        yield tell_nothing
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("start", total=1.0)
            yield lambda what, done: progress.update(task, description=what, completed=done)
    else:
        yield _lines()


def _lines() -> Tell:
    begin, told = time.monotonic(), {""}

    def tell(what: str, done: float) -> None:
        if what not in told:
            told.add(what)
            print(f"{time.monotonic() - begin:6.1f} s  {what}", file=sys.stderr, flush=True)

    return tell
