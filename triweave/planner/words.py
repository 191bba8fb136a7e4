"""What the command line of `plan` calls the keys of a run file: messages name what the user typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from triweave.errors import InputError, Problem

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "model.path": "--model",
        "cluster": "--cluster",
        "data.seq_len": "--seq",
        "train.global_batch": "--global-batch",
        "layout.tp_across_nodes": "--tp-across-nodes",
        "layout": "--layout",
        "top": "--top",
        "profile": "--profile",
    }
)
"""Options by the keys that they stand for; a key inside `layout` follows the option: `--layout tp`."""


def as_typed(problem: Problem) -> Problem:
    """A problem in the words of the command line."""
    section, _, name = problem.key.partition(".")
    key = OPTIONS.get(problem.key, f"{OPTIONS[section]} {name}" if section == "layout" else problem.key)
    rule = problem.rule.replace("layout.tp_across_nodes", OPTIONS["layout.tp_across_nodes"])
    return replace(problem, key=key, rule=rule)


@contextmanager
def typed() -> Iterator[None]:
    """Tells the problems found inside in the words of the command line."""
    try:
        yield
    except InputError as error:
        raise InputError(map(as_typed, error.problems)) from None
