"""Runs a chat template that nobody has vouched for.

Jinja's sandbox keeps a template away from Python. What it does not do is end: nested loops run forever, and
`'a' * 10**10`, `'a' | center(10**10)` or a text joined with itself fifty times take all memory. So compiling and
rendering run with a limit of their own on the process's address space, and every turn of a loop, call, filter and test
looks at a count of steps and at the processor time spent. Whole numbers are kept small, since arithmetic with millions
of digits is one step that takes minutes.
"""

from __future__ import annotations

import functools
import json
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 300_000
MAX_SECONDS = 3.0
"""Of the processor, for one rendering; a long conversation takes a hundredth of one."""
MAX_MEMORY_BYTES = 2**29
"""What compiling or one rendering may take beside what the process has."""
MAX_CHARACTERS = 64 * 2**20
MAX_BITS = 4096
"""Of a whole number."""

GENERATION_START, GENERATION_END = "\ufdd0", "\ufdd1"
"""Written around what a `{% generation %}` block renders. Unicode reserves both for use inside a program."""


class _Budget:
    """Steps and seconds that one rendering may still take. A template may not touch names with an underscore."""

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._end_s = time.thread_time() + MAX_SECONDS

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"takes more than {MAX_STEPS:,} steps")
        if time.thread_time() > self._end_s:
            raise SecurityError(f"takes more than {MAX_SECONDS:g} s")


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

    def __init__(self, **options: Any) -> None:
        # Constant expressions are computed where they are counted, too.
        super().__init__(optimized=False, **options)
        self.budget = _Budget()
        self.filters = {name: self._counted(function) for name, function in self.filters.items()}
        self.tests = {name: self._counted(function) for name, function in self.tests.items()}

    def _counted(self, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)  # takes over the mark by which Jinja passes a context
        def counted(*args: Any, **options: Any) -> Any:
            self.budget._spend()
            return function(*args, **options)

        return counted

    def counted_items(self, items: Iterable[Any]) -> Iterator[Any]:
        """What a loop runs over, a step an item."""
        for item in items:
            self.budget._spend()
            yield item

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget._spend()
        size = _product_size(left, right) if operator == "*" else _power_size(left, right)
        if size > MAX_CHARACTERS:
            raise SecurityError(f"{operator} gives a value of more than {MAX_CHARACTERS:,} elements")
        if _bits(left) + _bits(right) > MAX_BITS or (operator == "**" and size > MAX_BITS):
            raise SecurityError(f"{operator} gives a number of more than {MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget._spend()
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
    return 0


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


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let the block take no more than `MAX_MEMORY_BYTES` of new memory; beyond, Python raises MemoryError.

    The limit is the process's. Where other threads run meanwhile, they share it.
    """
    pages = Path("/proc/self/statm")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not pages.exists():  # not Linux: the limit of steps, seconds and characters is what remains
        yield
        return
    limit = int(pages.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
    bounds = [bound for bound in (limit, soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    except MemoryError:
        raise SecurityError(f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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

    environment.filters |= {"tojson": to_json, "_counted": environment.counted_items}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    environment.globals |= {"dict": make_dict, "namespace": _make_namespace}
    del environment.globals["lipsum"]

    environment.budget = _Budget()
    with _bounded_memory():
        tree = environment.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, "_counted", [], [], None, None, lineno=loop.lineno, environment=environment
            )
        template = environment.from_string(tree)

    def render(**variables: Any) -> str:
        parts: list[str] = []
        length = 0
        environment.budget = _Budget()
        with _bounded_memory():
            for part in template.generate(**variables):
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise SecurityError(f"renders more than {MAX_CHARACTERS:,} characters")
                parts.append(part)
            return "".join(parts)

    blocks = tree.find_all(nodes.CallBlock)
    return CompiledTemplate(render, any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks))
