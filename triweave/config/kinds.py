"""What a key may hold, read from the type hints of the configuration dataclasses, and how to say it in words."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Scalar = None | bool | int | float | str

REQUIRED = MISSING
"""The default of a key that has none."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a run file: `name` as a person writes it with dots, the type it holds, and its default."""

    name: str
    kind: Any
    default: Any


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a type that is no union is its own only alternative."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def default_of(field: Field[Any]) -> Any:
    """The value a left-out key takes, or REQUIRED."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def keys(schema: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a dataclass and of the sections in it, in the order of its fields."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        name, kind = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(kind):
            yield from keys(kind, f"{name}.")  # type: ignore[arg-type]
        else:
            yield Key(name, kind, default_of(field))


def holds_text(kind: Any) -> bool:
    """Whether every value of `kind` is text: a string, or a choice of words."""
    return kind is str or (get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind)))


def wanted(kind: Any) -> str:
    """What a value of `kind` is, in words that follow "must be": `a whole number or null`."""
    words: list[str] = []
    for member in members(kind):
        words += map(word_for, get_args(member)) if get_origin(member) is Literal else [_member_wanted(member)]
    return _listed(words)


def _member_wanted(kind: Any) -> str:
    if is_dataclass(kind):
        return f"a section with the keys {', '.join(field.name for field in fields(kind))}"
    if get_origin(kind) is tuple:
        return _tuple_wanted(get_args(kind))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}[kind]


def _tuple_wanted(items: tuple[Any, ...]) -> str:
    item, *rest = items
    if rest and set(items) == {int, float}:
        return f"a list of {len(items)} numbers"
    many = {int: "whole numbers", float: "numbers", str: "texts"}.get(item) or wanted(item)
    if rest != [Ellipsis]:
        return f"a list of {len(items)} {many}"
    if get_origin(item) is Literal:
        return f"a list out of {', '.join(map(word_for, get_args(item)))}"
    return f"text or a list of {many}" if item is str else f"a list of {many}"


def word_for(value: Scalar) -> str:
    """A scalar as every YAML reader reads it without quotes: `null`, `true`, `1.0`, `1.0e-08`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    # YAML 1.1 takes an exponent for text unless there is a point before it.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
