"""The strict loader: what a run file may hold, and what is said about everything else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.config.load import MAX_FILE_BYTES, load, load_run
from triweave.config.schema import DataConfig, ModelConfig, Run
from triweave.config.tree import MAX_DEPTH
from triweave.errors import InputError, Problem

SMALLEST = "model: {path: m}\ndata: {train: d.jsonl}\n"
RUN = Run(model=ModelConfig(path="m"), data=DataConfig(train=("d.jsonl",)))

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes text to a run file and returns its path."""

    def to_file(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def problems_of(path: Path, *words: str) -> list[Problem]:
    """What the loader says about a file that is wrong."""
    with pytest.raises(InputError) as caught:
        load_run(path, words)
    return list(caught.value.problems)


class TestGoodFiles:
    def test_defaults(self, write: Write) -> None:
        """A file with the two required keys takes every other value from the dataclasses."""
        assert load_run(write(SMALLEST)) == RUN

    def test_every_kind_of_value(self, write: Write) -> None:
        """Texts, numbers, booleans, choices, lists, null and nested sections become what the type hints say."""
        run = load_run(
            write(
                "model:\n  path: 'm'\n"
                "data: {train: [a.jsonl, b.jsonl], packing: FALSE, validation: held-out.jsonl}\n"
                "layout:\n  recompute: [swiglu, norm]\n  layers: [3, 2]\n  dp: ~\n"
                "optimizer: {learning_rate: 2e-5, betas: [0.9, 1], warmup_ratio: .03}\n"
                "train: {epochs: 2}\n"
            )
        )
        assert run.data.train == ("a.jsonl", "b.jsonl")
        assert (run.data.packing, run.data.validation) == (False, "held-out.jsonl")
        assert (run.layout.recompute, run.layout.layers, run.layout.dp) == (("swiglu", "norm"), (3, 2), None)
        assert (run.optimizer.learning_rate, run.optimizer.betas) == (2e-5, (0.9, 1.0))
        assert run.optimizer.warmup_ratio == 0.03
        assert isinstance(run.train.epochs, float)

    @pytest.mark.parametrize("text", ["2e-5", "2E-5", "2.0e-05", ".00002", "0.00002"])
    def test_spellings_of_a_number(self, write: Write, text: str) -> None:
        """A number in any spelling is a number, also those that YAML 1.1 takes for text."""
        run = load_run(write(f"{SMALLEST}optimizer: {{learning_rate: {text}}}\n"))
        assert run.optimizer.learning_rate == 2e-5

    @pytest.mark.parametrize("value", ["swiglu", "[swiglu]"])
    def test_one_text_is_a_list_of_one(self, write: Write, value: str) -> None:
        """Where a list of texts is wanted, a single text is enough."""
        assert load_run(write(f"{SMALLEST}layout: {{recompute: {value}}}\n")).layout.recompute == ("swiglu",)

    def test_quotes_keep_a_number_text(self, write: Write) -> None:
        """A quoted number is text: a share of the data without quotes, a path with them."""
        assert load_run(write(SMALLEST + "output_dir: '2024'\n")).output_dir == "2024"
        validation = load_run(write('model: {path: m}\ndata: {train: d, validation: "0.5"}\n')).data.validation
        assert validation == "0.5"

    @pytest.mark.parametrize("text", ["\ufeff" + SMALLEST, "---\n" + SMALLEST, "%YAML 1.2\n---\n" + SMALLEST + "...\n"])
    def test_frames_of_a_document(self, write: Write, text: str) -> None:
        """A byte order mark, document markers and a version line change nothing."""
        assert load_run(write(text)) == RUN


class TestWrongValues:
    @pytest.mark.parametrize(
        ("section", "key", "text", "rule", "nearest"),
        [
            ("data", "seq_len", "6.5", "must be a whole number", "6"),
            ("data", "seq_len", "1e3", "must be a whole number", "1000"),
            ("data", "seq_len", "4_096", "must be a whole number", "4096"),
            ("data", "seq_len", "'4096'", "must be a whole number", "4096"),
            ("data", "seq_len", "010", "must be a whole number", None),
            ("data", "seq_len", "true", "must be a whole number", None),
            ("data", "seq_len", "", "must be a whole number", None),
            ("data", "seq_len", "[1]", "must be a whole number", None),
            ("data", "seq_len", "{a: 1}", "must be a whole number", None),
            ("data", "packing", "yes", "must be true or false", "true"),
            ("data", "packing", "off", "must be true or false", "false"),
            ("data", "packing", "1", "must be true or false", "true"),
            ("data", "packing", "null", "must be true or false", None),
            ("data", "loss_on", "asistant", "must be assistant, completion or all", "assistant"),
            ("data", "validation", "null", "must be a number or text", None),
            ("data", "format", "true", "must be auto, messages", None),
            ("data", "tokenizer", "12", "must be text or null", '"12"'),
            ("layout", "schedule", "1F1B", "must be gpipe, 1f1b, interleaved or zero-bubble", "1f1b"),
            ("layout", "dp", "two", "must be a whole number or null", None),
            ("layout", "layers", "evn", "must be even, balanced or a list of whole numbers", "even"),
            ("layout", "layers", "4", "must be even, balanced or a list of whole numbers", None),
            ("layout", "recompute", "swiglo", "must be a list out of norm, swiglu", "swiglu"),
            ("optimizer", "learning_rate", "fast", "must be a number", None),
            ("optimizer", "learning_rate", "1e999", "must be a number", None),
            ("optimizer", "learning_rate", ".inf", "must be a number", None),
            ("optimizer", "learning_rate", ".nan", "must be a number", None),
            ("optimizer", "learning_rate", "'2e-5'", "must be a number", "2.0e-05"),
            ("optimizer", "betas", "[0.9]", "must be a list of 2 numbers", None),
            ("optimizer", "betas", "0.9", "must be a list of 2 numbers", None),
            ("optimizer", "warmup_steps", "0.1", "must be a whole number or null", None),
            ("train", "epochs", "none", "must be a number or null", None),
        ],
    )
    def test_message(self, write: Write, section: str, key: str, text: str, rule: str, nearest: str | None) -> None:
        """A value of the wrong type is told with its key, its line, what it must be and the nearest legal value."""
        path = write(f"model: {{path: m}}\n{section}:\n  {key}: {text}\n")
        told = [problem for problem in problems_of(path) if problem.key == f"{section}.{key}"]
        assert [problem.where for problem in told] == [f"{path}:3"]
        assert told[0].rule.startswith(rule)
        assert told[0].nearest == nearest

    def test_item_of_a_list(self, write: Write) -> None:
        """A wrong item is told with its place in the list and its own line."""
        path = write(f"{SMALLEST}layout:\n  layers: [4,\n    4.5]\n")
        assert [(p.key, p.value, p.where) for p in problems_of(path)] == [("layout.layers[1]", "4.5", f"{path}:5")]

    def test_section_without_keys(self, write: Write) -> None:
        """A section whose keys are commented out is not taken for its defaults."""
        (problem,) = problems_of(write(SMALLEST + "log:\n  # every_steps: 10\n"))
        assert problem.rule == "must be a section with the keys every_steps, to"

    def test_long_value_is_cut(self, write: Write) -> None:
        """A message repeats only the beginning of a long value."""
        (problem,) = problems_of(write(f"{SMALLEST}seed: {'x' * 5000}\n"))
        assert len(str(problem)) < 300

    def test_digits_without_end(self, write: Write) -> None:
        """A number with thousands of digits is a message, not a failure of the interpreter."""
        (problem,) = problems_of(write(f"{SMALLEST}seed: {'9' * 6000}\n"))
        assert problem.rule == "must be a whole number"


class TestKeys:
    @pytest.mark.parametrize(
        ("text", "key", "rule", "nearest"),
        [
            ("layout: {tpp: 4}", "layout.tpp", "is not a key of layout", "layout.tp"),
            ("layuot: {tp: 4}", "layuot", "is not a key of a run file", "layout"),
            ("layout: {micro-batch: 4}", "layout.micro-batch", "is spelt micro_batch here", "layout.micro_batch"),
            ("layout: {TP: 4}", "layout.TP", "is spelt tp here", "layout.tp"),
            ("layout: {zzz: 4}", "layout.zzz", "is not a key of layout", None),
            (
                "train: {learning_rate: 1.0}",
                "train.learning_rate",
                "belongs in the section optimizer",
                "optimizer.learning_rate",
            ),
            ("train: {seed: 1}", "train.seed", "belongs at the top of the file, in no section", "seed"),
            ("tp: 4", "tp", "belongs in the section layout", "layout.tp"),
            ("learning_rat: 4", "learning_rat", "is not a key of a run file", "optimizer.learning_rate"),
            ("layout.tp: 4", "layout.tp", "has a dot, which makes no section", "layout: {tp: ...}"),
            ("layout: {tp:4}", "layout.tp:4", "lacks a space after the colon", "tp: 4"),
            ("every_steps: 1", "every_steps", "belongs in the section validation or checkpoint or log", None),
            ("1: 2", "1", "is not a key of a run file", None),
            ("null: 2", "null", "is not a key of a run file", None),
        ],
    )
    def test_unknown(self, write: Write, text: str, key: str, rule: str, nearest: str | None) -> None:
        """A key that does not exist is told with the one that was meant, wherever that one belongs."""
        (problem,) = problems_of(write(f"{SMALLEST}{text}\n"))
        assert (problem.key, problem.rule) == (key, rule)
        assert nearest is None or problem.nearest == nearest

    def test_colon_without_space(self, write: Write) -> None:
        """A whole section without spaces after its colons is one text, and the message says why."""
        (problem,) = problems_of(write(SMALLEST + "layout:\n  tp:4\n"))
        assert problem.rule.endswith("(a space follows each colon)")

    def test_content_of_a_misspelt_section(self, write: Write) -> None:
        """What is in a misspelt section is checked as if the section were spelt right."""
        path = write(SMALLEST + "layuot:\n  tp: 4\n  pp: two\n  vp: 1\n")
        told = problems_of(path)
        assert [(p.key, p.value) for p in told] == [("layuot", None), ("layout.pp", "two"), ("layout.vp", "1")]

    def test_content_of_an_unknown_section(self, write: Write) -> None:
        """Keys in a section that does not exist are told one by one, at any depth."""
        path = write(SMALLEST + "grid:\n  tp: 4\n  deeper: {lr: 1, thing: 2}\n")
        assert [p.key for p in problems_of(path)] == [
            "grid",
            "grid.tp",
            "grid.deeper",
            "grid.deeper.lr",
            "grid.deeper.thing",
        ]

    def test_missing(self, write: Write) -> None:
        """Every required key that is missing is named, also when its whole section is."""
        assert {p.key: p.rule for p in problems_of(write("seed: 1\n"))} == {
            "model.path": "is missing: it must be text",
            "data.train": "is missing: it must be text or a list of texts",
        }

    def test_misspelt_required_key(self, write: Write) -> None:
        """A required key that is misspelt is told once: it is not called missing as well."""
        assert [p.key for p in problems_of(write("model: {pth: m}\ndata: {train: d}\n"))] == ["model.pth"]
        assert [p.key for p in problems_of(write("modle: {path: m}\ndata: {train: d}\n"))] == ["modle"]

    @pytest.mark.parametrize("text", ["seed: 1\nseed: 2\n", "log: {every_steps: 1, every_steps: 2}\n"])
    def test_duplicate(self, write: Write, text: str) -> None:
        """A key that is given twice is refused, with both lines."""
        path = write(SMALLEST + text)
        (problem,) = problems_of(path)
        assert problem.rule == f"is given twice, first at {path}:3"

    def test_everything_at_once(self, write: Write) -> None:
        """All mistakes of a file are told together, by line, those of the command line last."""
        path = write(
            "model: {path: m, dtype: bf16}\n"
            "data:\n  train: d\n  packing: no\n  cutoff_len: 4096\n"
            "layout: {tpp: 4}\n"
            "seed: 1\nseed: 2\n"
            "resume: *anchor\n"
        )
        told = problems_of(path, "train.steps=many")
        assert [problem.where for problem in told] == [
            *(f"{path}:{line}" for line in (1, 4, 5, 6, 8, 9)),
            "on the command line",
        ]


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "line", "said"),
        [
            ("a: [1,\n", 3, "expected the node content"),
            ("a: 'x", 2, "quoted scalar"),
            ("b: 1\n\ta: 1", 3, "indent with spaces"),
            ("a: 1\n b: 2", 3, "mapping values are not allowed here"),
            ("a: @b", 2, "cannot start any token"),
            ("b:\nc: 1\na: \x07", 4, "the character '\\x07' is not allowed"),
            ("a: %b", 2, "cannot start any token"),
        ],
    )
    def test_syntax(self, write: Write, text: str, line: int, said: str) -> None:
        """Text that is not YAML is told with the line where it stops being YAML."""
        path = write(f"seed: 1\n{text}")
        (problem,) = problems_of(path)
        assert said in problem.rule
        assert ("indent with spaces" in problem.rule) == ("\t" in text)
        assert problem.where == f"{path}:{line}"

    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("seed: &a 1\n", "has an anchor"),
            ("seed: *a\n", "is an alias"),
            ("seed: !!int 1\n", "has a tag"),
            ("seed: !python/object/apply:os.system [ls]\n", "has a tag"),
            ("log: !x {every_steps: 2}\n", "has a tag"),
            ("? [a, b]\n: 1\n", "has a list or a section for a key"),
            ("--- {}\n", "is a second document"),
        ],
    )
    def test_refused_feature(self, write: Write, text: str, rule: str) -> None:
        """Anchors, aliases, tags, keys that are no words and second documents are refused, nothing is run."""
        (problem,) = problems_of(write(SMALLEST + text))
        assert problem.rule.startswith(rule)

    def test_nested_aliases_are_not_expanded(self, write: Write) -> None:
        """A bomb of aliases is refused in the time it takes to read it."""
        lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
        assert len(problems_of(write("\n".join(lines)))) > 30

    @pytest.mark.parametrize("opening", ["[", "{a: ", "[{a: ", "{[", "{? ["])
    def test_deep_nesting(self, write: Write, opening: str) -> None:
        """Nesting that no run file has is a message, not an exhausted stack."""
        (problem,) = problems_of(write(f"seed: {opening * 2000}"))
        assert problem.rule == f"more than {MAX_DEPTH} levels of nesting"

    @given(st.text(alphabet="ab:-[]{}'\"#&*!|>%@`\n\t ,?\\0.1e", max_size=60))
    def test_any_yaml(self, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
        """No arrangement of YAML's own characters gets past the loader, or breaks it."""
        path = tmp_path_factory.getbasetemp() / "any.yaml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError):
            load_run(path)


class TestFiles:
    def test_missing_file(self, write: Write) -> None:
        """A file that does not exist is told with the name beside it that is most like it."""
        path = write(SMALLEST)
        (problem,) = problems_of(path.with_name("rum.yaml"))
        assert (problem.rule, problem.nearest) == ("does not exist", str(path))

    def test_folder(self, tmp_path: Path) -> None:
        """A folder is no run file."""
        assert problems_of(tmp_path)[0].rule == "is a folder"

    @pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
    def test_empty(self, write: Write, text: str) -> None:
        """A file without content is called empty."""
        assert problems_of(write(text))[0].rule == "is empty"

    @pytest.mark.parametrize("text", ["- a\n", "hello\n", "null\n"])
    def test_no_mapping(self, write: Write, text: str) -> None:
        """A file that holds no keys is refused."""
        assert problems_of(write(text))[0].rule.startswith("must hold keys")

    def test_not_utf8(self, tmp_path: Path) -> None:
        """Bytes that are not UTF-8 are told with their line."""
        path = tmp_path / "run.yaml"
        path.write_bytes(b"seed: 1\n# caf\xe9\n")
        (problem,) = problems_of(path)
        assert (problem.rule, problem.where) == ("is not UTF-8 text", f"{path}:2")

    def test_too_large(self, tmp_path: Path) -> None:
        """A data file given by mistake is refused before it is read."""
        path = tmp_path / "data.jsonl"
        path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
        assert "a run file has at most" in problems_of(path)[0].rule

    def test_without_an_end(self) -> None:
        """A device that never ends is refused after as much as a file may have."""
        (problem,) = problems_of(Path("/dev/zero"))
        assert problem.rule == f"has more than {MAX_FILE_BYTES} bytes; a run file has at most {MAX_FILE_BYTES}"

    def test_unreadable(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that may not be read is told with the system's reason."""

        def refuse(path: Path, mode: str) -> None:
            raise PermissionError(13, "Permission denied")

        path = write(SMALLEST)
        monkeypatch.setattr(Path, "open", refuse)
        assert problems_of(path)[0].rule == "cannot be read (Permission denied)"


class TestCommandLine:
    @pytest.mark.parametrize(
        "words", [["--layout.tp", "4"], ["--layout.tp=4"], ["layout.tp=4"]], ids=["two words", "dashes", "equals"]
    )
    def test_forms(self, write: Write, words: list[str]) -> None:
        """A key can be given in three forms, also in a section that the file does not have."""
        assert load_run(write(SMALLEST), words) == replace(RUN, layout=replace(RUN.layout, tp=4))

    def test_over_the_file(self, write: Write) -> None:
        """The command line wins over the file, and leaves the other keys of the section alone."""
        run = load_run(write(SMALLEST + "layout: {tp: 2, pp: 3}\n"), ["layout.tp=8"])
        assert (run.layout.tp, run.layout.pp) == (8, 3)

    def test_mends_the_file(self, write: Write) -> None:
        """A wrong value in the file does not matter once the command line replaces it."""
        assert load_run(write(SMALLEST + "seed: x\n"), ["seed=1"]).seed == 1

    @pytest.mark.parametrize(
        ("word", "value"),
        [
            ("output_dir=runs/a: b #1", "runs/a: b #1"),
            ("output_dir=*.d", "*.d"),
            ("output_dir='1'", "1"),
            ('output_dir="a\\tb"', "a\tb"),
            ("output_dir=a=b", "a=b"),
        ],
    )
    def test_text(self, write: Write, word: str, value: str) -> None:
        """A word without quotes is taken as it stands; with quotes it is YAML's quoted text."""
        assert load_run(write(SMALLEST), [word]).output_dir == value

    def test_list(self, write: Write) -> None:
        """A list is written as in YAML."""
        words = ["--layout.layers", "[3, 2]", "--data.train=[a, b]"]
        run = load_run(write(SMALLEST), words)
        assert (run.layout.layers, run.data.train) == ((3, 2), ("a", "b"))

    def test_null_unsets(self, write: Write) -> None:
        """Null takes a key of the file back."""
        run = load_run(write(SMALLEST + "train: {epochs: 2}\n"), ["train.epochs=null", "train.steps=5"])
        assert (run.train.epochs, run.train.steps) == (None, 5)

    @pytest.mark.parametrize(
        ("words", "key", "rule"),
        [
            (["layout.tp=four"], "layout.tp", "must be a whole number"),
            (["layout.tpp=4"], "layout.tpp", "is not a key of layout"),
            (["--micro-batch-size", "4"], "micro-batch-size", "is a key of Axolotl"),
            (["--layout.tp"], "layout.tp", "needs a value"),
            (["--layout.tp", "--seed=1"], "layout.tp", "needs a value"),
            (["fast"], "fast", "must be KEY=VALUE"),
            (["=4"], "=4", "must be KEY=VALUE"),
            (["seed=1", "--seed", "2"], "seed", "is given twice"),
            (["layout={tp: 4}"], "layout", "is a section: give its keys one by one"),
            (["layout.layers=[1,"], "layout.layers", "while parsing"),
            (["layout.layers=[*a]"], "layout.layers", "is an alias"),
            (["seed.more=1"], "seed", "must be a whole number"),
        ],
    )
    def test_mistake(self, write: Write, words: list[str], key: str, rule: str) -> None:
        """A mistake on the command line is told like one in the file, and says where it is."""
        (problem,) = problems_of(write(SMALLEST), *words)
        assert problem.key == key
        assert problem.rule.startswith(rule)
        assert problem.where == "on the command line"


@dataclass(frozen=True)
class Inner:
    size: int
    names: tuple[Literal["a", "b"], ...] = ()


@dataclass(frozen=True)
class Loose:
    depth: int = 2


@dataclass(frozen=True)
class Outer:
    inner: Inner
    loose: Loose
    scale: float | None = None


def test_other_dataclasses(write: Write) -> None:
    """The loader knows nothing of runs: any dataclasses of scalars, lists and dataclasses can be read."""
    assert load(Outer, write("inner: {size: 3, names: [b]}\nscale: 2\n")) == Outer(Inner(3, ("b",)), Loose(), 2.0)
    with pytest.raises(InputError, match=r"inner\.size: is missing"):
        load(Outer, write("scale: 1\n"))


def test_loads_without_torch_and_numpy(write: Write) -> None:
    """Reading a run file, validation included, imports neither torch nor numpy."""
    code = (
        "import sys; from pathlib import Path; from triweave.config.load import load_run\n"
        "from triweave.config.validate import validate; from triweave.config.document import to_yaml\n"
        "to_yaml(load_run(Path(sys.argv[1]), ['seed=7']))\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code, str(write(SMALLEST))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
