"""YAML that every reader reads the same: Go's, which knows 1e5 for a number, and those that know `on` for a truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from triweave.config.document import yaml_text


class _Dumper(yaml.SafeDumper):
    """Texts in quotes unless no reader takes them for something else; scripts as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # What begins with a digit or a point may be a number: 1e5 and 0o17 are of YAML 1.2, 1:30 of YAML 1.1.
    plain = (text[:1].isalpha() or text[:1] == "/") and yaml_text(text) == text
    style = "|" if "\n" in text else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(*documents: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    """Documents as YAML.

    Args:
        documents: mappings of scalars, lists and mappings.
        head: comment lines that stand first.
    """
    body = yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True, explicit_start=len(documents) > 1
    )
    return "".join(f"{line}\n" for line in head) + body
