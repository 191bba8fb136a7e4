"""The rules of the house: what no linter checks, so that nobody has to remember it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import triweave
from triweave.config.schema import LayoutConfig

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "triweave").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {contract["type"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
HEAVY = CONTRACTS["forbidden"]["forbidden_modules"]

MAX_LINES = 400
LEFT_FOR_SOMEBODY = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b")
OF_ONE_MACHINE = re.compile(
    r"(?<![\w.{}$-])/(?:work|root|farm|tmp|home/\w+|Users/\w+)/"
    r"|index[-]url|--regist[r]y|pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|registry[.]npmjs"
)


def relative(path: Path) -> str:
    """How a path is named in a test's id: from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def repository_files() -> list[Path]:
    """Every file that is tracked, or would be if it were added now."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for name in names if name and (path := ROOT / name).is_file()]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that lists what it imports on standard error."""
    command = (sys.executable, "-X", "importtime", "-c", code, *arguments)
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)


def heavy_imports(importtime: str) -> set[str]:
    """Which of the packages that the numbers half must not import an `-X importtime` listing holds."""
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in importtime.splitlines()}
    return imported & set(HEAVY)


def undocumented(source: str) -> list[str]:
    """Names of the module, its public classes and functions whose docstring is not a sentence."""

    def sentence(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        return len((ast.get_docstring(node) or "").split()) >= 2

    def walk(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_") or "overload" in {ast.unparse(item) for item in child.decorator_list}:
                continue
            if not sentence(child):
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")

    module = ast.parse(source)
    return ([] if sentence(module) else ["module"]) + list(walk(module, ""))


def without_sentence(source: str) -> list[str]:
    """Names of the tests that do not say what behaviour they hold."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]


def test_numbers_half_imports_no_torch() -> None:
    """Every module of the numbers half starts in a process that never loads torch, numpy or their kin."""
    packages = CONTRACTS["forbidden"]["source_modules"]
    code = (
        "import importlib, pkgutil\n"
        f"for name in {packages!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    for found in pkgutil.walk_packages(getattr(module, '__path__', []), name + '.'):\n"
        "        importlib.import_module(found.name)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not heavy_imports(done.stderr)


def test_help_imports_no_torch() -> None:
    """`triweave --help` answers without loading torch, numpy or their kin."""
    done = run_python("from triweave.cli import main; raise SystemExit(main())", "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Usage" in done.stdout
    assert not heavy_imports(done.stderr)


def test_heavy_import_is_seen() -> None:
    """The check above sees a heavy package that a function imports late."""
    assert heavy_imports(run_python("def late():\n    import numpy.linalg\nlate()").stderr) == {"numpy"}


def test_numbers_half_is_listed_once() -> None:
    """The layers from planning down are exactly the modules that must not import torch."""
    layers: list[str] = CONTRACTS["layers"]["layers"]
    below = layers[layers.index("groups") + 1 :]
    names = {f"triweave.{name.strip(' ()')}" for layer in below for name in layer.split(":")}
    modules = {relative(path.with_suffix("")).removesuffix("/__init__").replace("/", ".") for path in MODULES}
    assert set(CONTRACTS["forbidden"]["source_modules"]) == names & modules


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_is_documented_and_short(path: Path) -> None:
    """A module has a docstring, so has everything public in it, and it fits one sitting."""
    source = path.read_text(encoding="utf-8")
    assert undocumented(source) == []
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", TESTS, ids=relative)
def test_every_test_states_a_behaviour(path: Path) -> None:
    """Every test says in a docstring what it holds."""
    assert without_sentence(path.read_text(encoding="utf-8")) == []


def test_missing_docstrings_are_seen() -> None:
    """A module, a class, a method, a function and a test without a sentence are each named."""
    planted = 'class A:\n    """."""\n    def b(self): ...\n    def _c(self): ...\ndef test_d(): ...\n'
    assert undocumented(planted) == ["module", "A", "A.b", "test_d"]
    assert without_sentence(planted) == ["test_d"]


def test_repository_speaks_of_the_project_alone() -> None:
    """No file holds a path of one machine or the address of a registry, and nothing is left for somebody."""
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        patterns = (OF_ONE_MACHINE, LEFT_FOR_SOMEBODY) if path.suffix == ".py" else (OF_ONE_MACHINE,)
        found += [f"{relative(path)}: {match[0]}" for pattern in patterns for match in pattern.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (OF_ONE_MACHINE, "open('/" + "work/data')"),
        (OF_ONE_MACHINE, "/" + "home/ada/models"),
        (OF_ONE_MACHINE, "pip install --index" + "-url x"),
        (LEFT_FOR_SOMEBODY, "# TO" + "DO: later"),
    ],
)
def test_foreign_text_is_seen(pattern: re.Pattern[str], text: str) -> None:
    """The patterns above find what they are for."""
    assert pattern.search(text)


@pytest.mark.parametrize("before", ["docs", "${SCRATCH}", "https://example.org"])
@pytest.mark.parametrize("folder", ["work", "tmp"])
def test_ordinary_path_is_no_machine_path(before: str, folder: str) -> None:
    """A relative path, one below a variable and an address are left alone."""
    assert not OF_ONE_MACHINE.search(f"{before}/{folder}/x")


def test_version_stands_in_one_place() -> None:
    """The version is written in `triweave/__init__.py` and nowhere else."""
    version = re.compile(rf"(?<![\d.]){re.escape(triweave.__version__)}(?![\d.])")
    places = ["pyproject.toml", "CITATION.cff", "README.md", *map(relative, MODULES)]
    assert [place for place in places if version.search((ROOT / place).read_text(encoding="utf-8"))] == [
        "triweave/__init__.py"
    ]
    assert PYPROJECT["project"]["dynamic"] == ["version"]


def test_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    """The wheel carries every module, the py.typed marker and the licence, and no test, bench or example."""
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"triweave/py.typed", *map(relative, MODULES)} <= names
    assert {name.partition("/")[0] for name in names} == {"triweave", f"triweave-{triweave.__version__}.dist-info"}
    assert f"triweave-{triweave.__version__}.dist-info/licenses/LICENSE" in names


def test_glossary_gives_one_meaning() -> None:
    """A word stands in the glossary once, and every key of the layout is explained there."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [match[1].partition(" (")[0] for match in re.finditer(r"^\| (?!word|form|-)(.+?) \|", page, re.MULTILINE)]
    assert len(words) == len(set(words))
    keys = set(LayoutConfig.__dataclass_fields__) - {"tp_across_nodes"}
    assert keys <= set(re.findall(r"`(\w+)`", page))


@pytest.mark.parametrize("path", DECISIONS, ids=relative)
def test_decision_has_the_form_of_a_record(path: Path) -> None:
    """A record has its number, a date, and what it was, is and follows."""
    text = path.read_text(encoding="utf-8")
    assert re.match(rf"# {int(path.name[:4])}\. \S", text)
    assert re.search(r"^Date: \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]


def test_requirements_are_pinned() -> None:
    """Every requirement of the two commands has one exact version, and no index is named."""
    lines = [
        line
        for path in sorted((ROOT / "requirements").glob("*.txt"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert [
        line for line in lines if not re.fullmatch(r"-r demo\.txt|[\w.-]+==[\w.]+(; sys_platform == \"linux\")?", line)
    ] == []
