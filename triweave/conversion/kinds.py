"""What a folder of weights is: Hugging Face's, a checkpoint of triweave, or one of Megatron-Core."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from triweave.errors import InputError, Problem, closest
from triweave.weights_index import INDEX_FILE, SINGLE_FILE

Kind = Literal["hf", "triweave", "megatron"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KIND_NAMES = {
    "hf": "a Hugging Face folder",
    "triweave": "a checkpoint of triweave",
    "megatron": "a torch_dist checkpoint of Megatron-Core",
}

CONTENTS_FILE = ".metadata"
PROGRESS_FILE = "progress.json"
MEGATRON_FORMAT_FILE = "metadata.json"
MEGATRON_TRACKER_FILE = "latest_checkpointed_iteration.txt"
MEGATRON_RELEASE = "release"
"""Megatron's name of an iteration that holds weights only."""
MODEL_FOLDER = "hugging_face"
"""Inside a Megatron checkpoint that was written here: config.json and tokenizer."""

_MAX_SMALL_FILE_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Found:
    """A folder of weights."""

    kind: Kind
    folder: Path
    """Where its files are: for Megatron the iteration's."""
    root: Path
    """What was named."""


def recognise(path: Path, key: str) -> Found:
    """What `path` holds, by the files that are in it.

    Args:
        path: a folder.
        key: what to call it in a message.

    Raises:
        InputError: none of the three; where a checkpoint lies near, it is named.
    """
    if not path.is_dir():
        raise InputError(Problem(key, path, "is not a folder", _neighbour(path)))
    found = look(path)
    if found is not None:
        return found
    steps = sorted(path.glob("step-*"), key=_number) or sorted(path.glob("checkpoints/step-*"), key=_number)
    if steps:
        raise InputError(Problem(key, path, "is a folder of checkpoints; name one of them", str(steps[-1])))
    if any(path.glob("mp_rank_*")) or any(path.glob("*/mp_rank_*")):
        rule = "is a checkpoint of Megatron's old format, which is a pickle and is never read here"
        raise InputError(Problem(key, path, rule, "Megatron-LM's --ckpt-convert-format torch_dist"))
    names = ", ".join(KIND_NAMES.values())
    told = f"is none of {names}: it has neither config.json with weights nor {CONTENTS_FILE}"
    raise InputError(Problem(key, path, told))


def look(path: Path) -> Found | None:
    """What `path` holds, None when it is none of the three."""
    if (path / "config.json").is_file() and any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return Found("hf", path, path)
    if (path / CONTENTS_FILE).is_file() and (path / PROGRESS_FILE).is_file():
        return Found("triweave", path, path)
    iteration = path
    if (path / MEGATRON_TRACKER_FILE).is_file():
        iteration = path / _iteration(path / MEGATRON_TRACKER_FILE)
    if (iteration / CONTENTS_FILE).is_file() and _is_torch_dist(iteration / MEGATRON_FORMAT_FILE):
        return Found("megatron", iteration, path)
    return None


def target_kind(source: Found, target: Path, to: str | None) -> Kind:
    """What to write: `--to`, or what the name of `target` says, or the Hugging Face folder that most want.

    Raises:
        InputError: `to` is no kind, or it cannot be told what is wanted, or it would be what the source is already.
    """
    if to is not None and to not in KINDS:
        raise InputError(Problem("--to", to, f"must be {', '.join(KINDS)}", closest(to, KINDS)))
    chosen = next((kind for kind in KINDS if kind == to), None) or _kind_by_name(target)
    if chosen is None and source.kind == "hf":
        raise InputError(
            Problem("--to", None, f"is needed: what {target} shall be is not told by its name", "triweave")
        )
    chosen = chosen or "hf"
    if chosen == source.kind == "triweave":
        rule = "is what SRC is already: a checkpoint fits every layout, and `train` reshards it when it resumes"
        raise InputError(Problem("--to", chosen, rule, "hf"))
    if chosen == source.kind == "megatron":
        raise InputError(Problem("--to", chosen, "is what SRC is already; Megatron reshards it when it loads", "hf"))
    return chosen


def check_target(source: Found, target: Path, *, force: bool) -> None:
    """Refuse a destination that is the source, lies in it or around it, or holds something.

    Raises:
        InputError: one of these.
    """
    here, there = source.root.resolve(), target.resolve()
    if here == there:
        raise InputError(Problem("DST", target, "is SRC: it would be read while it is replaced"))
    if there in here.parents or here in there.parents:
        raise InputError(Problem("DST", target, f"and SRC = {source.root} lie one inside the other"))
    if target.is_symlink():
        raise InputError(Problem("DST", target, "is a link; name the folder itself", str(there)))
    if target.exists() and not target.is_dir():
        raise InputError(Problem("DST", target, "is a file"))
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise InputError(Problem("DST", target, "is not empty", "another folder, or --force to replace it"))
        if look(target) is None:
            names = " nor ".join(KIND_NAMES.values())
            raise InputError(Problem("DST", target, f"is neither {names}, so --force does not replace it"))


def read_small_text(path: Path) -> str:
    """The text of a file that is known to be short.

    Raises:
        InputError: it is long, or cannot be read.
    """
    try:
        if path.stat().st_size > _MAX_SMALL_FILE_BYTES:
            raise InputError(Problem("SRC", path, f"has more than {_MAX_SMALL_FILE_BYTES} bytes"))
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(Problem("SRC", path, f"cannot be read ({error})")) from None


def _kind_by_name(target: Path) -> Kind | None:
    if re.fullmatch(r"step-\d+", target.name):
        return "triweave"
    return None


def _iteration(tracker: Path) -> str:
    word = read_small_text(tracker).strip()
    if word == MEGATRON_RELEASE:
        return word
    if not re.fullmatch(r"\d{1,9}", word):
        raise InputError(Problem("SRC", tracker, "must hold the number of an iteration, or release"))
    return f"iter_{int(word):07d}"


def _is_torch_dist(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        told = json.loads(read_small_text(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(told, dict) and told.get("sharded_backend") == "torch_dist"


def _number(path: Path) -> int:
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and len(digits) < 10 else -1


def _neighbour(path: Path) -> str | None:
    try:
        names: Sequence[str] = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir())
    except OSError:
        return None
    near = closest(path.name, names)
    return str(path.with_name(near)) if near else None
