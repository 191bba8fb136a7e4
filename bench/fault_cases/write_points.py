"""Every system call of a save fails once, or is the last thing that the process does.

The calls are found by a save that goes well: each open, write, fsync, mkdir, rename, unlink and rmdir below the
checkpoints' folder is one point. Then each point fails with each error that it may, in a save of its own. Injected by
wrapping the functions of `os`, through which all of `triweave.checkpoint` goes; a kill is a child process that leaves
at the point by `os._exit`, which runs nothing of ours.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fault_cases.rows import Row
from fault_cases.small_checkpoints import save_small, set_state, small_engine, state_hash

from triweave.checkpoint.damaged import damage
from triweave.checkpoint.kept import found
from triweave.checkpoint.local_store import LocalStore
from triweave.groups import alone
from triweave.training.checkpoints import load_checkpoint
from triweave.training.engine import Engine
from triweave.training.saver import Saved

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
ERRORS = {
    "open": (errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "fsync": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "mkdir": (errno.ENOSPC, errno.EIO, errno.EROFS),
    "rename": (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT),
    "replace": (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT),
    "unlink": (errno.EIO, errno.EROFS),
    "rmdir": (errno.EIO, errno.EROFS),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One system call of a save."""

    number: int
    call: str


@dataclass(slots=True)
class Case:
    """A folder in which step 1 is saved, and the engine that saves step 2 into it, keeping one."""

    engine: Engine
    before: Path
    where: Path
    hashes: dict[str, str]
    replaced: bool
    """Whether step 2 is there already, damaged, and is to be replaced."""

    def prepare(self) -> None:
        """As it was before."""
        shutil.rmtree(self.where, ignore_errors=True)
        shutil.copytree(self.before, self.where)

    def save(self) -> Saved:
        """Save step 2."""
        return save_small(self.where, self.engine, 2, keep=1)

    def verdict(self, saved: Saved | None) -> str:
        """Empty if all is well: a whole checkpoint is there, nothing that looks like one is not, and it is said."""
        store = LocalStore(self.where)
        if saved is None:
            store.sweep()
        names = found(store)
        damages = {name: damage(store, name, alone()) for name in names}
        was_there = "step-2" if self.replaced and (saved is None or saved.problem) else ""
        bad = [name for name, problem in damages.items() if problem is not None and name != was_there]
        whole = [name for name, problem in damages.items() if problem is None]
        if bad or not whole:
            return f"there are {damages}"
        if saved is not None and saved.problem is None and whole[0] != "step-2":
            return "a save that failed is called a success"
        if saved is not None and saved.problem is None and saved.remark is None and names != ["step-2"]:
            return "what is left is not told"
        load_checkpoint(self.where / whole[0], self.engine)
        right = state_hash(self.engine) == self.hashes[whole[0]]
        set_state(self.engine, 2)
        if not right:
            return f"{whole[0]} is not what was saved"
        store.sweep()
        again = self.save()
        if again.problem is not None or again.remark is not None or found(store) != ["step-2"]:
            return f"the next save says {again}"
        left = sorted(path.name for path in self.where.iterdir())
        return "" if left == ["latest", "step-2"] else f"left over: {left}"


def run(quick: bool, out: Path) -> list[Row]:
    """Fail and kill saves at every point; `quick` takes every seventh."""
    torch.set_num_threads(1)
    engine = small_engine(out / "model")
    set_state(engine, 1)
    before = out / "before"
    save_small(before, engine, 1)
    hashes = {"step-1": state_hash(engine)}
    set_state(engine, 2)
    hashes["step-2"] = state_hash(engine)
    stale = out / "stale"
    shutil.copytree(before, stale)
    save_small(stale, engine, 2)
    next((stale / "step-2").glob("*.distcp")).write_bytes(b"damaged")
    rows = []
    for what, source in (("a save", before), ("a save over a damaged one", stale)):
        case = Case(engine, source, out / "where", hashes, replaced=source == stale)
        case.prepare()
        points: list[Point] = []
        with watched(case.where, lambda point, points=points: points.append(point)):  # type: ignore[misc]
            case.save()
        chosen = points[:: 7 if quick else 1]
        for call in CALLS:
            rows.append(failures(case, what, call, [point for point in chosen if point.call == call]))
        rows.append(kills(case, what, chosen))
        rows.append(short_writes(case, what))
    return [row for row in rows if row.tried]


def failures(case: Case, what: str, call: str, points: list[Point]) -> Row:
    """Each of the points fails with each error."""
    verdicts = []
    for point in points:
        for code in ERRORS[call]:
            case.prepare()
            with watched(case.where, fail_at(point, code)):
                saved = case.save()
            told = " ".join(filter(None, (saved.problem, saved.remark)))
            # A folder that is there already need not be made: that failure is none, and nothing is told.
            verdicts.append("" if not told or os.strerror(code) in told else f"says {told!r}")
            verdicts[-1] = verdicts[-1] or case.verdict(saved)
    names = "/".join(errno.errorcode[code] for code in ERRORS[call])
    return counted(f"{what}: {call} fails with {names}", verdicts)


def kills(case: Case, what: str, points: list[Point]) -> Row:
    """The process is gone at each of the points."""
    verdicts = []
    for point in points:
        case.prepare()
        child = os.fork()
        if child == 0:
            with suppress(BaseException), watched(case.where, leave_at(point)):
                case.save()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        verdicts.append(case.verdict(None) if os.waitstatus_to_exitcode(status) == 9 else "was not killed")
    return counted(f"{what}: killed at every call", verdicts)


def short_writes(case: Case, what: str) -> Row:
    """Every write takes only a part of what it is given, as on a full pipe or a busy network disk."""
    case.prepare()
    write = os.write
    with patch.object(os, "write", lambda handle, data: write(handle, memoryview(data)[: max(1, len(data) // 3)])):
        saved = case.save()
    return counted(f"{what}: every write is cut short", [saved.problem or case.verdict(saved)])


def counted(test: str, verdicts: list[str]) -> Row:
    """A row, with the first thing that went wrong."""
    wrong = [verdict for verdict in verdicts if verdict]
    return Row(test, len(verdicts), len(verdicts) - len(wrong), wrong[0] if wrong else "")


def fail_at(point: Point, code: int) -> Callable[[Point], None]:
    """Raise the error that the system call would."""

    def act(at: Point) -> None:
        if at == point:
            raise OSError(code, os.strerror(code))

    return act


def leave_at(point: Point) -> Callable[[Point], None]:
    """End the process before the call."""

    def act(at: Point) -> None:
        if at == point:
            os._exit(9)

    return act


@contextmanager
def watched(folder: Path, act: Callable[[Point], None]) -> Iterator[None]:
    """Call `act` before every system call that would change something below `folder`, with its number."""
    count = 0

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            reads = name == "open" and not (args and args[0] & (os.O_WRONLY | os.O_RDWR))
            if not reads and is_below(first, folder, kwargs):
                count += 1
                act(Point(count, name))
            return original(first, *args, **kwargs)

        return call

    wrapped = {name: wrap(name, getattr(os, name)) for name in CALLS}
    # shutil takes its safe way only where these very functions can be given a folder's descriptor.
    supported = os.supports_dir_fd | {wrapped["open"], wrapped["unlink"], wrapped["rmdir"]}
    with patch.multiple(os, **wrapped), patch.object(os, "supports_dir_fd", supported):
        yield


def is_below(target: Any, folder: Path, kwargs: dict[str, Any]) -> bool:
    """Whether a path, or what a descriptor stands for, lies in a folder."""
    if isinstance(target, int):
        path = os.readlink(f"/proc/self/fd/{target}")
    elif kwargs.get("dir_fd") is not None:
        path = os.path.join(os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}"), target)
    else:
        path = os.fspath(target)
    return path.startswith(str(folder))
