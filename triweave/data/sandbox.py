"""Runs a chat template that nobody has vouched for.

Jinja's sandbox keeps a template away from Python. What it does not do is end: nested loops run forever and
`'a' * 10**10` takes all memory. So the steps of one rendering (turns of a loop, calls), the length of a product
and the length of the result are bounded here. A template can still waste memory by joining strings; it cannot
read, write or start anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 300_000
MAX_CHARACTERS = 64 * 2**20

GENERATION_START, GENERATION_END = "\ufdd0", "\ufdd1"
"""Written around what a `{% generation %}` block renders. Unicode reserves both for use inside a program."""


class _Budget:
    """Steps that one rendering may still take. A template sees it, but may not touch names with an underscore."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"takes more than {MAX_STEPS:,} steps")


def _spend(context: Context) -> None:
    # `parent` holds what render() was given; a template's own {% set %} never reaches it.
    context.parent["_budget"]._spend()


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend(context)
        yield item


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: what the assistant writes (a convention of Hugging Face)."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        return f"{GENERATION_START}{caller()}{GENERATION_END}"


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _product_size(left, right) if operator == "*" else _power_size(left, right)
        if size > MAX_CHARACTERS:
            raise SecurityError(f"{operator} gives a value of more than {MAX_CHARACTERS:,} elements or bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _spend(context)
        return super().call(context, function, *args, **kwargs)


class _Namespace(Namespace):
    """Jinja's namespace without underscore names, as in transformers."""

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _make_namespace(*args: Any, **kwargs: Any) -> _Namespace:
    attributes = dict(*args, **kwargs)
    for name in attributes:
        _refuse_underscore(name)
    return _Namespace(attributes)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"namespace attribute {name} begins with an underscore")


def _product_size(left: Any, right: Any) -> int:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return _bits(left) + _bits(right)


def _power_size(base: Any, exponent: Any) -> int:
    return _bits(base) * abs(exponent) if isinstance(exponent, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A template that can be rendered within the bounds."""

    render: Callable[..., str]
    """Renders with the keywords it is given; raises what the template raises."""
    marks_generation: bool
    """Whether the template has `{% generation %}` blocks: whether it says itself what the assistant writes."""


def compile_template(source: str, now: datetime) -> CompiledTemplate:
    """Compile the chat template `source`.

    The environment is transformers': trimmed blocks, loop controls, `tojson` that leaves characters as they are,
    `raise_exception`, and `strftime_now`, which tells `now` as long as the template lives.

    Raises:
        jinja2.TemplateError: here for wrong syntax; from the rendering for what the template itself refuses, or a
            bound that it goes over.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    environment.filters |= {"tojson": to_json, "_counted": _counted}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    environment.globals |= {"dict": make_dict, "namespace": _make_namespace}
    del environment.globals["lipsum"]

    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno, environment=environment)
    template = environment.from_string(tree)

    def render(**variables: Any) -> str:
        parts: list[str] = []
        length = 0
        for part in template.generate(**variables, _budget=_Budget()):
            length += len(part)
            if length > MAX_CHARACTERS:
                raise SecurityError(f"renders more than {MAX_CHARACTERS:,} characters")
            parts.append(part)
        return "".join(parts)

    blocks = tree.find_all(nodes.CallBlock)
    return CompiledTemplate(render, any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks))
