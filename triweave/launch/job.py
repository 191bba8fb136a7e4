"""What every engine is told of a run: its name, nodes, processes, command, time, and where a stop is written down."""

from __future__ import annotations

import math
import posixpath
import re
from dataclasses import dataclass
from typing import Literal

from triweave.cluster import Cluster
from triweave.config.validate import ResolvedRun
from triweave.errors import InputError, Problem
from triweave.moments import MOMENTS_BYTES
from triweave.planner.time_step import predict_step
from triweave.planner.time_trainer import trainer_with
from triweave.run_folder import MASTER_BYTES, STOPPED_FILE

Kind = Literal["job", "jobset", "trainjob"]
"""Kubernetes: an indexed Job, a JobSet, or Kubeflow's TrainJob."""
START_S = 600
"""Allowed for starting, loading and exporting, in a time limit that is predicted."""
MARGIN = 1.25
"""On the slow end of the predicted step time: validation, saves, a slow node."""
WRITE_BYTES_PER_S = 1e9
"""Taken for what a node writes to shared storage: slow, so that a warning comes early enough."""
LEAST_WARNING_S = 120
EARLY_S = 60
"""Slurm may warn a minute early and is never late; elsewhere it is a margin."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the run file does not say: where it runs, and what the site wants to know."""

    run_file: str
    """As seen from `workdir`, or absolute."""
    workdir: str
    """Folder on the nodes that the paths of the run file start from."""
    overrides: tuple[str, ...] = ()
    """Words that change keys of the run file."""
    name: str | None = None
    """Of the job; None is the last part of output_dir."""
    python: str = "python"
    """Interpreter on the nodes."""
    time_limit: str | None = None
    """[DAYS-]HH:MM:SS; None is what the plan predicts."""
    warning_s: int | None = None
    """Seconds between the request to stop and the end; None follows from the plan."""
    restarts: int = 0
    """How often a crash is started again."""
    partition: str | None = None
    """Slurm's."""
    account: str | None = None
    """Slurm's."""
    image: str | None = None
    """Container image with triweave in it."""
    claim: str | None = None
    """Kubernetes: the PersistentVolumeClaim that is mounted at `workdir`."""
    kind: Kind = "job"
    """Kubernetes: what is written."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run as a scheduler sees it."""

    name: str
    cluster: Cluster
    num_nodes: int
    gpus_per_node: int
    """Ranks of a node."""
    gpu: str | None
    """Catalogue name; None on a cluster of CPUs."""
    words: tuple[str, ...]
    """`train RUN.yaml --KEY VALUE ...`, what `python -m triweave` gets."""
    workdir: str
    output_dir: str
    """Absolute on the nodes, or below `workdir` where it is relative."""
    time_limit_s: int | None
    """None where nobody said and nothing predicts it."""
    time_source: str
    """Where the limit comes from, for a comment."""
    warning_s: int

    @property
    def stopped_file(self) -> str:
        """Path that exists while the run stands stopped on request, everything saved."""
        return posixpath.join(self.output_dir, STOPPED_FILE)


def make_job(resolved: ResolvedRun, settings: Settings) -> Job:
    """The job of a run.

    Raises:
        InputError: the run names no cluster, a name or path that no file can hold, a time limit that is none.
    """
    problems: list[Problem] = []
    run, cluster = resolved.run, resolved.cluster
    name = settings.name if settings.name is not None else posixpath.basename(run.output_dir.rstrip("/"))
    texts = {
        "--name": name,
        "--workdir": settings.workdir,
        "--python": settings.python,
        "run file": settings.run_file,
        "output_dir": run.output_dir,
    }
    optional = {"--partition": settings.partition, "--account": settings.account, "--image": settings.image}
    texts |= {key: value for key, value in optional.items() if value is not None}
    texts |= {f"word {number} of the command line": word for number, word in enumerate(settings.overrides, 1)}
    for key, text in texts.items():
        problems += _text_problems(key, text)
    if "/" in name:
        problems.append(Problem("--name", name, "must hold no /: it becomes a file name", name.replace("/", "-")))
    if not settings.workdir.startswith("/"):
        problems.append(Problem("--workdir", settings.workdir, "must be an absolute path"))
    if settings.restarts < 0:
        problems.append(Problem("--restarts", settings.restarts, "must not be negative", "0"))
    if cluster is None:
        rule = "is missing: the files are sized from it"
        problems.append(Problem("cluster", None, rule, f"1x{resolved.layout.world_size}xh100-80gb"))
    if problems or cluster is None:
        raise InputError(problems)
    step_s = slow_step_s(resolved, cluster)
    limit_s, source = _time_limit(resolved, settings.time_limit, step_s)
    warning_s = _warning_s(resolved, cluster, step_s) if settings.warning_s is None else settings.warning_s
    if limit_s is not None and not 0 < warning_s < limit_s:
        rule = f"must lie between 0 and the time limit of {limit_s} s"
        raise InputError(Problem("--warning", warning_s, rule, str(limit_s // 2)))
    return Job(
        name=name,
        cluster=cluster,
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node,
        gpu=None if cluster.gpu.name == "cpu" else cluster.gpu.name,
        words=("train", settings.run_file, *settings.overrides),
        workdir=settings.workdir,
        output_dir=posixpath.join(settings.workdir, run.output_dir),
        time_limit_s=limit_s,
        time_source=source,
        warning_s=warning_s,
    )


def slow_step_s(resolved: ResolvedRun, cluster: Cluster) -> float | None:
    """The slow end of the predicted step time; None for a GPU without measured speeds."""
    run = resolved.run
    try:
        predicted = predict_step(
            resolved.spec,
            resolved.layout,
            cluster,
            seq_len=run.data.seq_len,
            global_batch=run.train.global_batch,
            precision="fp8" if run.model.fp8 else "bf16",
            stack=trainer_with(run.optimizer.moments),
        )
    except InputError:
        return None
    return predicted.range_s[1]


def clock(seconds: int) -> str:
    """A duration as Slurm writes it.

    >>> clock(90061)
    '1-01:01:01'
    """
    days, rest = divmod(seconds, 86400)
    hours, minutes = rest // 3600, rest // 60 % 60
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:{rest % 60:02}"


def read_clock(text: str) -> int:
    """Seconds of `[DAYS-]HH:MM:SS`.

    Raises:
        InputError: it has another form, or is no time at all.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    numbers = [*([days] if dash else []), *parts]
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) <= 4 for part in numbers):
        raise InputError(Problem("--time-limit", repr(text), "must be [DAYS-]HH:MM:SS", "24:00:00"))
    hours, minutes, seconds = map(int, parts)
    total = (int(days) if dash else 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total == 0 or minutes > 59 or seconds > 59:
        raise InputError(Problem("--time-limit", repr(text), "must be [DAYS-]HH:MM:SS above zero", "24:00:00"))
    return total


def plain_name_problems(name: str) -> list[Problem]:
    """For engines that pass a name through a shell of theirs, or refuse others themselves."""
    if re.fullmatch(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", name):
        return []
    plain = re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-")
    return [Problem("--name", repr(name), "must be letters and digits, with . _ - between them", plain or "run")]


def _text_problems(key: str, text: str) -> list[Problem]:
    """A line break or another control character ends a directive, whatever quotes stand around it."""
    if not text.strip():
        return [Problem(key, repr(text), "must not be empty")]
    odd = next((one for one in text if not one.isprintable()), None)
    return [] if odd is None else [Problem(key, repr(text), f"must hold printable characters only, not {odd!r}")]


def _time_limit(resolved: ResolvedRun, given: str | None, step_s: float | None) -> tuple[int | None, str]:
    if given is not None:
        return read_clock(given), "as given by --time-limit"
    steps = resolved.run.train.steps
    if steps is None:
        return None, "train.epochs says how much data, not how many steps"
    if step_s is None:
        return None, "the step time on this cluster cannot be predicted"
    seconds = START_S + steps * step_s * MARGIN
    whole = math.ceil(seconds / 600) * 600
    return whole, f"predicted: {steps} steps of at most {step_s:.2f} s, {MARGIN} times, and {START_S} s around them"


def _warning_s(resolved: ResolvedRun, cluster: Cluster, step_s: float | None) -> int:
    """A step, and a save of everything from all nodes at once."""
    saved_bytes = MASTER_BYTES + MOMENTS_BYTES[resolved.run.optimizer.moments]
    save_s = resolved.spec.num_parameters * saved_bytes / (WRITE_BYTES_PER_S * cluster.num_nodes)
    seconds = EARLY_S + 2 * (step_s or 0.0) + save_s
    return max(LEAST_WARNING_S, math.ceil(seconds / 30) * 30)
