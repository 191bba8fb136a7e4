"""The run file explained and written out: its keys with their docs, the resolved copy, a commented file."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

import yaml

from triweave.config.kinds import REQUIRED, default_of, wanted, word_for
from triweave.config.schema import Run
from triweave.config.tree import join, resolve

USUAL_KEYS = (
    "model.path",
    "model.dtype",
    "cluster",
    "layout.tp",
    "layout.pp",
    "layout.micro_batch",
    "layout.schedule",
    "layout.recompute",
    "layout.offload",
    "layout.shard",
    "data.train",
    "data.validation",
    "data.seq_len",
    "data.packing",
    "data.loss_on",
    "optimizer.learning_rate",
    "optimizer.lr_schedule",
    "optimizer.weight_decay",
    "optimizer.max_grad_norm",
    "train.global_batch",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "output_dir",
    "seed",
)
"""What a person usually sets."""

COMMENT_WIDTH = 100

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")
_TEXT = "tag:yaml.org,2002:str"
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the run file as the reference page shows it."""

    key: str
    type: str
    """What it must be, in words."""
    default: str | None
    """As YAML; None if the key is required."""
    doc: str


def field_docs(schema: type) -> dict[str, str]:
    """The string under each field of a dataclass, by field, on one line; fields without one are left out."""
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    docs = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for statement, following in itertools.pairwise(statements):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


def describe(schema: type = Run, prefix: str = "") -> list[Entry]:
    """Every key of a run file, in the order of the dataclasses."""
    hints, docs = get_type_hints(schema), field_docs(schema)
    entries: list[Entry] = []
    for field in fields(schema):
        key, kind, default = join(prefix, field.name), hints[field.name], default_of(field)
        if is_dataclass(kind):
            entries += describe(kind, key)  # type: ignore[arg-type]
        else:
            text = None if default is REQUIRED else yaml_text(default)
            entries.append(Entry(key, wanted(kind), text, docs[field.name]))
    return entries


def to_yaml(run: Run) -> str:
    """Every key of `run`, defaults included; `load_run` gives the equal run back."""
    return "".join(_lines(run, "", docs=False, only=None))


def commented_yaml(run: Run, *, only: Collection[str] = USUAL_KEYS, schema_path: str | None = None) -> str:
    """A run file for a person to go on with: what each key means stands above it.

    Args:
        run: The run; `load_run` gives the equal run back.
        only: Dotted keys to write. Keys that differ from their default and required keys are written anyway.
        schema_path: Where the file's JSON schema lies, for editors that complete and check keys.
    """
    written = set(only) | set(_told(run))
    head = f"# yaml-language-server: $schema={schema_path}\n" if schema_path else ""
    return head + "".join(_lines(run, "", docs=True, only=written))


def yaml_text(value: Any) -> str:
    """A scalar, or a tuple of scalars, as YAML on one line; every YAML reader reads the same value."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    if not isinstance(value, str):
        return word_for(value)
    # Readers of YAML 1.1 see dates, octal numbers and booleans in some plain words; these get quotes too.
    old = yaml.resolver.Resolver().resolve(yaml.ScalarNode, value, (True, False))
    if _PLAIN.fullmatch(value) and isinstance(resolve(value), str) and old == _TEXT and value.lower() not in ("y", "n"):
        return value
    return f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _lines(section: Any, prefix: str, *, docs: bool, only: set[str] | None) -> Iterator[str]:
    """Lines of a section; `only` None writes every key, else a key (or a section with one) that it names."""
    indent = "  " * (prefix.count(".") + 1 if prefix else 0)
    texts = field_docs(type(section)) if docs else {}
    for field in fields(section):
        key, value = join(prefix, field.name), getattr(section, field.name)
        if only is not None and not any(name == key or name.startswith(f"{key}.") for name in only):
            continue
        doc = texts.get(field.name) or (type(value).__doc__ or "" if docs else "")
        for line in textwrap.wrap(doc, COMMENT_WIDTH - len(indent) - 2):
            yield f"{indent}# {line}\n"
        if is_dataclass(value):
            yield f"{indent}{field.name}:\n"
            yield from _lines(value, key, docs=docs, only=only)
        else:
            yield f"{indent}{field.name}: {yaml_text(value)}\n"


def _told(section: Any, prefix: str = "") -> Iterator[str]:
    """Keys whose value is not the default."""
    for field in fields(section):
        key, value = join(prefix, field.name), getattr(section, field.name)
        if is_dataclass(value):
            yield from _told(value, key)
        elif value != default_of(field):
            yield key
