"""What is made from the dataclasses: docs, JSON schema, the reference page, and YAML that loads back."""

from __future__ import annotations

import json
import re
import types
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from triweave.config import reference
from triweave.config.document import USUAL_KEYS, commented_yaml, describe, field_docs, to_yaml, yaml_text
from triweave.config.kinds import keys
from triweave.config.load import load_run
from triweave.config.reference import is_current, json_schema, reference_page
from triweave.config.schema import DataConfig, ModelConfig, Run

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "run-file.md"
RUN = Run(model=ModelConfig(path="m"), data=DataConfig(train=("d.jsonl",)))
TRAPS = (
    *("yes", "no", "on", "y", "null", "~", "true", "1", "1e5", "0x1f", "0o7", "010", "1_0", "1:30", ".inf", ".5"),
    *("2024-01-02", "", " ", "a: b", "#", "- x", "[", "&a", "*a", "!t", "%", "@", "`", "<<", "=", '"', "'", "\\"),
    *("\ufeff", "\x85", "\u2028", "\udc80", "\x00", "é", "🙂", "a\nb"),
)
TEXTS = st.text(max_size=12) | st.sampled_from(TRAPS)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Every value that a type hint allows."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields(kind)})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        item, *rest = arguments
        many = st.lists(values(item), max_size=4).map(tuple)
        return many if rest == [Ellipsis] else st.tuples(*map(values, arguments))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: TEXTS,
        type(None): st.none(),
    }
    return simple[kind]


def plain(value: Any) -> Any:
    """A dataclass as the mappings, lists and scalars that a YAML or JSON reader gives."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return list(value) if isinstance(value, tuple) else value


class TestDocs:
    def test_every_field_has_one(self) -> None:
        """Every key of the run file has a string under it, and every section a docstring."""
        hints = get_type_hints(Run)
        sections = [kind for kind in hints.values() if is_dataclass(kind)]
        for schema in (Run, *sections):
            assert isinstance(schema, type)
            assert schema.__doc__
            named = {field.name for field in fields(schema) if not is_dataclass(hints.get(field.name))}
            assert named - set(field_docs(schema)) == set()

    def test_missing_one_is_seen(self) -> None:
        """A field without a string is left out, and another statement's string is not taken for its own."""

        @dataclass
        class Schema:
            """A string that belongs to the class."""

            first: int
            second: int
            """Two
            lines."""
            third: int = 3

        assert field_docs(Schema) == {"second": "Two lines."}

    def test_entries(self) -> None:
        """Every key is described once, in order, with its type in words and its default as YAML."""
        entries = {entry.key: entry for entry in describe()}
        assert list(entries) == [key.name for key in keys(Run)]
        assert entries["model.path"].default is None
        assert entries["optimizer.eps"].default == "1.0e-08"
        assert entries["layout.layers"].type == "even, balanced or a list of whole numbers"
        assert entries["data.train"].type == "text or a list of texts"
        assert entries["seed"].doc.startswith("Seed of data order")


class TestYaml:
    @given(run=values(Run))
    def test_round_trip(self, run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
        """The resolved copy of any run loads back as the equal run."""
        path = tmp_path_factory.getbasetemp() / "resolved.yaml"
        path.write_text(to_yaml(run), encoding="utf-8")
        assert load_run(path) == run

    @given(run=values(Run))
    def test_other_readers(self, run: Run) -> None:
        """A YAML 1.1 reader that is not ours reads the same values, traps included."""
        assert yaml.safe_load(to_yaml(run)) == plain(run)

    @given(run=values(Run), only=st.sets(st.sampled_from([key.name for key in keys(Run)])))
    def test_commented_round_trip(self, run: Run, only: set[str], tmp_path_factory: pytest.TempPathFactory) -> None:
        """A commented file loads back as the equal run, whichever keys are asked for."""
        path = tmp_path_factory.getbasetemp() / "commented.yaml"
        path.write_text(commented_yaml(run, only=only), encoding="utf-8")
        assert load_run(path) == run

    @pytest.mark.parametrize("text", TRAPS)
    def test_trap(self, text: str) -> None:
        """Text that YAML could take for something else is read as the text it is."""
        assert yaml.safe_load(f"a: {yaml_text(text)}") == {"a": text}

    def test_every_key_is_written(self) -> None:
        """The resolved copy names every key, defaults included."""
        assert len(re.findall(r"^ *\w+: ", to_yaml(RUN), re.MULTILINE)) == len(list(keys(Run)))

    @pytest.mark.parametrize("text", ["m", "runs/llama-70b", "./a.b", "1f1b", "meta-llama/Llama-3.1-70B", "bfloat16"])
    def test_ordinary_text_has_no_quotes(self, text: str) -> None:
        """Words and paths are written as a person writes them."""
        assert yaml_text(text) == text


class TestCommentedFile:
    def test_usual_keys_exist(self) -> None:
        """The keys that are written by default are keys of a run, and about twenty."""
        assert set(USUAL_KEYS) <= {key.name for key in keys(Run)}
        assert len(USUAL_KEYS) <= 25

    def test_comments(self) -> None:
        """Above each key stands what it means, indented with it and not too wide."""
        text = commented_yaml(RUN, only=("layout.tp",))
        assert "  # Tensor parallel size. Must divide the attention heads; keep it inside a node.\n  tp: 1\n" in text
        assert max(map(len, text.splitlines())) <= 100

    def test_only_what_is_asked_for(self) -> None:
        """Beside the keys asked for, only required keys and changed ones are written."""
        run = replace(RUN, train=replace(RUN.train, epochs=2.0))
        assert yaml.safe_load(commented_yaml(run, only=("layout.tp",))) == {
            "model": {"path": "m"},
            "data": {"train": ["d.jsonl"]},
            "layout": {"tp": 1},
            "train": {"epochs": 2.0},
        }

    def test_schema_line(self) -> None:
        """The first line names the JSON schema if there is one, in the form that editors look for."""
        text = commented_yaml(RUN, schema_path="run.schema.json")
        assert text.startswith("# yaml-language-server: $schema=run.schema.json\n")


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON schema that ours uses, straight from its specification."""
    if "anyOf" in schema:
        return any(accepts(option, value) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(properties)
            and all(accepts(properties[key], item) for key, item in value.items())
        )
    if schema["type"] == "array":
        if not isinstance(value, list) or len(value) < schema.get("minItems", 0):
            return False
        prefix = schema.get("prefixItems", [])
        if schema["items"] is False and len(value) > len(prefix):
            return False
        kinds = prefix or [schema["items"]] * len(value)
        return all(accepts(kind, item) for kind, item in zip(kinds, value, strict=True))
    names: dict[str, Any] = {"integer": int, "number": (int, float), "string": str, "null": type(None)}
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    return isinstance(value, names[schema["type"]]) and not isinstance(value, bool)


class TestJsonSchema:
    @given(run=values(Run))
    def test_accepts_runs(self, run: Run) -> None:
        """Every run is valid under the schema."""
        assert accepts(json_schema(), plain(run))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"layout": {"tpp": 4}},
            {"layout": {"tp": "4"}},
            {"layout": {"tp": 4.5}},
            {"layout": {"schedule": "1F1B"}},
            {"layout": {"recompute": ["nrom"]}},
            {"optimizer": {"betas": [0.9]}},
            {"optimizer": {"betas": [0.9, 0.9, 0.9]}},
            {"data": {"packing": "yes", "train": "d"}},
            {"data": {}},
            {"seed": None},
        ],
    )
    def test_refuses_mistakes(self, wrong: dict[str, Any]) -> None:
        """What the loader refuses is refused by the schema."""
        right = {"model": {"path": "m"}, "data": {"train": "d"}}
        assert accepts(json_schema(), right)
        assert not accepts(json_schema(), right | wrong)

    def test_says_what_editors_show(self) -> None:
        """The schema is JSON, names its draft, and carries docs and defaults."""
        schema = json.loads(json.dumps(json_schema()))
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert schema["required"] == ["model", "data"]
        tp = schema["properties"]["layout"]["properties"]["tp"]
        assert tp == {"description": field_docs(type(RUN.layout))["tp"], "type": "integer", "default": 1}


class TestReferencePage:
    def test_is_current(self) -> None:
        """The page in docs is what the dataclasses and the table of foreign keys give today."""
        assert is_current(PAGE), f"run: python -m triweave.config.reference docs/reference/{PAGE.name}"

    def test_check_sees_a_change(self, tmp_path: Path) -> None:
        """The check fails on a page that is missing or was edited, and writing mends it."""
        path = tmp_path / "reference" / "page.md"
        assert reference.main(["--check", str(path)]) == 1
        assert reference.main([str(path)]) == 0
        assert reference.main(["--check", str(path)]) == 0
        path.write_text(path.read_text(encoding="utf-8") + "x", encoding="utf-8")
        assert reference.main(["--check", str(path)]) == 1

    def test_names_every_key(self) -> None:
        """Every key has its row, in the table of its section; tables have no stray columns."""
        page = reference_page()
        tables = {part.partition("\n")[0]: part for part in page.split("\n## ")}
        for key in keys(Run):
            section, _, name = key.name.rpartition(".")
            assert f"\n| `{name}` |" in tables[section or "At the top, in no section"]
        rows = [line for line in page.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}
