"""From a tree of nodes to the dataclasses, by their type hints alone; every mistake is told, none is guessed away."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from triweave.config.kinds import Scalar as Value
from triweave.config.kinds import default_of, holds_text, members, wanted, word_for
from triweave.config.tree import Listing, Node, Refused, Scalar, Section, join, resolve, shown
from triweave.config.unknown import UnknownKeys
from triweave.errors import Problem, closest

WRONG: Final = object()
"""Stands where a value would stand, had it been right; its problem is in the list."""

_BOOLEANS = dict.fromkeys(("yes", "y", "on", "1", "true"), "true") | dict.fromkeys(
    ("no", "n", "off", "0", "false"), "false"
)


def convert(kind: Any, node: Node, key: str, unknown: UnknownKeys, problems: list[Problem]) -> Any:
    """The value of type `kind` that `node` holds, or WRONG after adding to `problems`."""
    alternatives = members(kind)
    if isinstance(node, Refused):
        return WRONG
    if isinstance(node, Section) and (schema := next(filter(is_dataclass, alternatives), None)):
        return _section(schema, node, key, unknown, problems)  # type: ignore[arg-type]
    if isinstance(node, Listing):
        for alternative in alternatives:
            if get_origin(alternative) is tuple:
                return _tuple(alternative, node, key, unknown, problems)
    if isinstance(node, Scalar):
        for alternative in alternatives:
            if (value := _scalar(alternative, node.value)) is not WRONG:
                return value
    nearest = _nearest(alternatives, node) if isinstance(node, Scalar) else None
    problems.append(Problem(key, shown(node), f"must be {wanted(kind)}{_hint(kind, node)}", nearest, node.where))
    return WRONG


def _section(schema: type, node: Section, key: str, unknown: UnknownKeys, problems: list[Problem]) -> Any:
    hints = get_type_hints(schema)
    values: dict[str, Any] = {}
    meant: set[str | None] = set()
    for name, child in node.entries.items():
        path = join(key, name)
        if name in hints:
            values[name] = convert(hints[name], child, path, unknown, problems)
            continue
        explained = unknown.explain(list(hints), key, name, child)
        problems.append(explained.problem)
        meant.add(explained.meant)
        if isinstance(child, Section):
            if explained.meant and is_dataclass(kind := hints[explained.meant]):
                convert(kind, child, join(key, explained.meant), unknown, problems)
            else:
                problems.extend(unknown.strangers(child, path, certain=explained.certain))
    for field in fields(schema):
        if field.name in values or field.name in meant or default_of(field) is not MISSING:
            continue
        path, kind = join(key, field.name), hints[field.name]
        if is_dataclass(kind):
            values[field.name] = convert(kind, Section(node.where), path, unknown, problems)
        else:
            values[field.name] = WRONG
            problems.append(Problem(path, None, f"is missing: it must be {wanted(kind)}", None, node.where))
    return WRONG if meant or any(value is WRONG for value in values.values()) else schema(**values)


def _tuple(kind: Any, node: Listing, key: str, unknown: UnknownKeys, problems: list[Problem]) -> Any:
    first, *rest = get_args(kind)
    kinds = [first] * len(node.items) if rest == [Ellipsis] else [first, *rest]
    if len(kinds) != len(node.items):
        problems.append(Problem(key, shown(node), f"must be {wanted(kind)}", None, node.where))
        return WRONG
    values = [
        convert(item_kind, item, f"{key}[{index}]", unknown, problems)
        for index, (item_kind, item) in enumerate(zip(kinds, node.items, strict=True))
    ]
    return WRONG if any(value is WRONG for value in values) else tuple(values)


def _scalar(kind: Any, value: Value) -> Any:
    """`value` as a `kind`, or WRONG. A whole number is a number too; a single text is a list of one text."""
    if get_origin(kind) is Literal:
        same = (choice for choice in get_args(kind) if type(choice) is type(value) and choice == value)
        return next(same, WRONG)
    if get_origin(kind) is tuple:
        item, *rest = get_args(kind)
        text = _scalar(item, value) if rest == [Ellipsis] and holds_text(item) else WRONG
        return WRONG if text is WRONG else (text,)
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number else WRONG  # type: ignore[arg-type]
    return value if type(value) is kind else WRONG


def _nearest(kinds: Iterable[Any], node: Scalar) -> str | None:
    """The legal value that a wrong scalar was most likely meant to be."""
    return next(filter(None, (_nearest_of(kind, node) for kind in kinds)), None)


def _nearest_of(kind: Any, node: Scalar) -> str | None:
    if kind is bool:
        return _BOOLEANS.get(node.text.lower())
    if kind in (int, float):
        number = resolve(node.text.replace("_", ""))  # 1_000 and "4" are meant as numbers
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            return None
        whole = round(number)
        if kind is int:
            return word_for(whole) if whole or not number else None  # 0.1 is not nearly 0: it is a share
        return word_for(number)
    if kind is str and node.value is not None and not node.quoted:
        return json.dumps(node.text)
    if get_origin(kind) is Literal:
        return closest(node.text.lower(), [word_for(choice) for choice in get_args(kind)])
    if get_origin(kind) is tuple and get_args(kind)[0] not in (int, float):
        return _nearest_of(get_args(kind)[0], node)
    return None


def _hint(kind: Any, node: Node) -> str:
    if is_dataclass(kind) and isinstance(node, Scalar) and ":" in node.text and ": " not in node.text:
        return " (a space follows each colon)"
    return ""
