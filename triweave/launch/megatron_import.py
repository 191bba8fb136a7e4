"""Megatron-LM's arguments as a run file, and an account of each: taken over, without effect here, or left open."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triweave.config.document import commented_yaml
from triweave.config.load import load_words
from triweave.config.schema import Run
from triweave.errors import InputError, Problem, closest
from triweave.launch.megatron_rows import ALWAYS, DEFAULTS, FROM_THE_MODEL, MOMENTS, ROWS, STRATEGIES, WORLD, Row
from triweave.launch.megatron_script import Script, read_script

NAMES = Path(__file__).with_name("megatron-0.19.2.txt")
"""Every option of Megatron-Core 0.19.2, one a line, as its own parser lists them."""
MOST_BYTES = 2**20

Fate = Literal[
    "taken over",
    "not given, Megatron's default",
    "does nothing here",
    "has no counterpart, see to it",
    "is no option of Megatron-Core 0.19.2",
]


@dataclass(frozen=True, slots=True)
class Accounted:
    """What became of one argument."""

    text: str
    fate: Fate
    note: str


@dataclass(frozen=True, slots=True)
class Imported:
    """A run, and what became of every argument."""

    run: Run
    arguments: tuple[Accounted, ...]
    to_fill_in: tuple[str, ...]
    """Keys that the arguments do not give, with what stands there now."""


def read_source(source: str) -> Script:
    """A script by its path, or the text of its arguments.

    Raises:
        InputError: it is neither, or holds no argument.
    """
    key = "--from-megatron"
    if source.lstrip().startswith("--"):
        text = source
    else:
        path = Path(source)
        try:
            if path.stat().st_size > MOST_BYTES:
                raise InputError(Problem(key, source, f"has more than {MOST_BYTES} bytes: no script of arguments"))
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InputError(Problem(key, source, "is not UTF-8 text")) from None
        except (OSError, ValueError) as error:
            rule = f"cannot be read ({getattr(error, 'strerror', None) or error})"
            raise InputError(Problem(key, source, rule)) from None
    try:
        script = read_script(text)
    except ValueError as error:
        raise InputError(Problem(key, source, f"cannot be read as bash ({error})")) from None
    if not any(word.startswith("--") for word in script.words):
        raise InputError(Problem(key, source, "holds no command with arguments that begin with --"))
    return script


def run_file_from(script: Script) -> str:
    """The run file, with the account of the arguments as comments above it."""
    found = import_arguments(script)
    lines = ["# From a Megatron-LM command line. What became of each of its arguments:"]
    for fate in dict.fromkeys(one.fate for one in sorted(found.arguments, key=lambda one: _ORDER.index(one.fate))):
        lines += ["#", f"# {fate}:"]
        told = [one for one in found.arguments if one.fate == fate]
        lines += [f"#   {one.text}: {one.note}" if one.note else f"#   {one.text}" for one in told]
    if found.to_fill_in:
        lines += ["#", "# to be filled in:", *(f"#   {one}" for one in found.to_fill_in)]
    return "\n".join([*lines, "", commented_yaml(found.run)])


_ORDER: tuple[Fate, ...] = (
    "has no counterpart, see to it",
    "is no option of Megatron-Core 0.19.2",
    "taken over",
    "not given, Megatron's default",
    "does nothing here",
)


def import_arguments(script: Script) -> Imported:
    """The run of a command line.

    Raises:
        InputError: a value that its option cannot have.
    """
    given = options(script.words)
    keys: dict[str, str] = {}
    world = _world(script)
    known = {**given, WORLD: (str(world),)} if world else given
    told = [_one(name, values, known, keys) for name, values in given.items()]
    for key, (value, names) in DEFAULTS.items():
        if not set(names) & set(given):
            keys[key] = value
            told.append(Accounted(" and ".join(names), "not given, Megatron's default", f"{key}: {value}"))
    open_keys = _settle(given, script, keys)
    run = load_words(Run, [f"{key}={value}" for key, value in keys.items()], "run")
    return Imported(run, tuple(told), tuple(open_keys))


def options(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Options with their values; of one that is given twice the last, as argparse takes it.

    >>> options(["--lr", "1e-5", "--bf16", "--split=99,1,0"])
    {'--lr': ('1e-5',), '--bf16': (), '--split': ('99,1,0',)}
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
    return {name: tuple(values) for name, values in found.items()}


def _one(name: str, values: tuple[str, ...], given: Mapping[str, tuple[str, ...]], keys: dict[str, str]) -> Accounted:
    """Account for one argument, and set the keys that it gives."""
    text = shlex.join([name, *values])
    row = ROWS.get(name)
    if name in ("--attention-dropout", "--hidden-dropout"):
        return _dropout(text, values)
    if row is not None:
        return _taken(text, row, values, given, keys)
    if name in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        return _moments(text, given, keys)
    if name in FROM_THE_MODEL:
        return Accounted(text, "does nothing here", "config.json of the model says it")
    if name in ALWAYS:
        return Accounted(text, "does nothing here", ALWAYS[name])
    if name in _known_names():
        return Accounted(text, "has no counterpart, see to it", "")
    near = closest(name, sorted(_known_names()))
    return Accounted(text, "is no option of Megatron-Core 0.19.2", f"nearest: {near}" if near else "")


def _dropout(text: str, values: tuple[str, ...]) -> Accounted:
    if values and float(values[0]) == 0:
        return Accounted(text, "does nothing here", "there is no dropout")
    return Accounted(text, "has no counterpart, see to it", "there is no dropout here")


def _moments(text: str, given: Mapping[str, tuple[str, ...]], keys: dict[str, str]) -> Accounted:
    """The type of both moments, where they have one and it is ours."""
    if "--use-precision-aware-optimizer" not in given:
        return Accounted(text, "does nothing here", "it is read with --use-precision-aware-optimizer only")
    first, second = (given.get(name, ("fp32",)) for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype"))
    if first != second or first not in MOMENTS:
        return Accounted(text, "has no counterpart, see to it", "optimizer.moments is float32 or bfloat16, for both")
    keys["optimizer.moments"] = MOMENTS[first]
    return Accounted(text, "taken over", f"optimizer.moments: {MOMENTS[first]}")


def _taken(
    text: str, row: Row, values: tuple[str, ...], given: Mapping[str, tuple[str, ...]], keys: dict[str, str]
) -> Accounted:
    if any("$" in value for value in values):
        return Accounted(text, "has no counterpart, see to it", f"its value is not in the script; here it is {row.key}")
    try:
        value = row.value(values, given)
    except (ValueError, IndexError, ZeroDivisionError):
        raise InputError(Problem(text.split()[0], " ".join(values), f"is no value for {row.key}")) from None
    if value is None:
        return Accounted(text, "does nothing here", row.otherwise)
    keys[row.key] = value
    note = f"; {row.note}" if row.note else ""
    return Accounted(text, "taken over", f"{row.key}: {value}{note}")


def _settle(given: Mapping[str, tuple[str, ...]], script: Script, keys: dict[str, str]) -> list[str]:
    """Keys that follow from several arguments, or from none being there; returns what is left to be filled in."""
    number: Callable[[str], int] = lambda key: int(keys.get(key, "1"))  # noqa: E731
    world = _world(script)
    model_ranks = number("layout.tp") * number("layout.pp") * number("layout.cp")
    if world and world % model_ranks == 0:
        keys["layout.dp"] = str(world // model_ranks)
    if number("layout.tp") > 1:
        keys.setdefault("layout.sequence_parallel", "false")
    if "--use-megatron-fsdp" in given:
        strategy = given.get("--data-parallel-sharding-strategy", ("optim_grads_params",))
        keys["layout.shard"] = STRATEGIES.get(" ".join(strategy), "full")
    elif keys.get("layout.dp") != "1":
        keys.setdefault("layout.shard", "none")
    if keys.get("layout.shard") == "none":
        keys.pop("layout.shard_group", None)
    if "--pipeline-model-parallel-layout" in given:
        stages = keys["layout.layers"].count(",") + 1
        if stages > number("layout.pp") and stages % number("layout.pp") == 0:
            keys["layout.vpp"] = str(stages // number("layout.pp"))
    if number("layout.vpp") > 1:
        keys["layout.schedule"] = "interleaved"
    if "--bf16" not in given:
        keys["model.dtype"] = "float32"
    if "train.global_batch" not in keys:
        keys["train.global_batch"] = str(number("layout.micro_batch") * number("layout.dp"))
    return list(_placeholders(given, keys, script))


def _placeholders(given: Mapping[str, tuple[str, ...]], keys: dict[str, str], script: Script) -> Iterable[str]:
    if "model.path" not in keys:
        keys["model.path"] = "models/MODEL"
        yield "model.path: the Hugging Face folder of the model; convert a Megatron checkpoint with triweave convert"
    keys["data.train"] = "[data/train.jsonl]"
    yield "data.train: the text that --data-path was made from; Megatron's indexed files are not read"
    if "train.steps" not in keys:
        keys["train.epochs"] = "1.0"
        yield "train.epochs: no --train-iters was given"
    nodes, per_node = _launched(script)
    yield f"cluster: {nodes or 'NODES'}x{per_node or 'GPUS'}xGPU, as in 4x8xh100-80gb"


def _launched(script: Script) -> tuple[int | None, int | None]:
    """Nodes and ranks of a node, from torchrun's options."""
    found = {name.replace("_", "-"): values for name, values in options(script.launcher).items()}

    def number(name: str) -> int | None:
        text = "".join(found.get(name, ()))
        return int(text) if text.isdecimal() and int(text) > 0 else None

    return number("--nnodes"), number("--nproc-per-node")


def _world(script: Script) -> int | None:
    nodes, per_node = _launched(script)
    return nodes * per_node if nodes and per_node else None


def _known_names() -> frozenset[str]:
    return frozenset(NAMES.read_text(encoding="utf-8").split())
