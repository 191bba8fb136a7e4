"""Where benches write: below `runs/`, which git ignores, unless they are told otherwise."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"


def defaults(text: str) -> Iterator[str]:
    """The default of every option that names a file or folder to write, as the code has it; "" for none."""
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "add_argument":
            continue
        if ast.literal_eval(call.args[0]) in ("--out", "--results", "--markdown"):
            given = {word.arg: word.value for word in call.keywords}
            yield ast.unparse(given["default"]) if "default" in given else ""


@pytest.mark.parametrize("path", sorted(BENCH.rglob("*.py")), ids=lambda path: path.relative_to(BENCH).as_posix())
def test_nothing_is_written_beside_the_code(path: Path) -> None:
    """A bench that writes without being told where writes below runs/."""
    for default in defaults(path.read_text(encoding="utf-8")):
        assert default in ("", "Path('runs')") or default.removeprefix("Path(").startswith("'runs/")


def test_a_default_beside_the_code_is_seen() -> None:
    """Both ways to say it are found."""
    text = 'p.add_argument("--out", default=Path("save.json"))\np.add_argument("--out", default="save.json")'
    assert list(defaults(text)) == ["Path('save.json')", "'save.json'"]


def test_git_ignores_what_is_written() -> None:
    """No file below runs/ can be committed by accident, wherever a bench is started."""
    names = ["runs/save.json", "bench/runs/save.json"]
    done = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == names


def test_the_folder_is_made_for_the_default_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option gives a path in a folder that is there, whether it was given or not."""
    spec = importlib.util.spec_from_file_location("result_file", BENCH / "result_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    parser = ArgumentParser()
    parser.add_argument("--out", type=module.result_file, default="runs/save.json")
    for words, expected in (([], "runs/save.json"), (["--out", "here/a.json"], "here/a.json")):
        path = parser.parse_args(words).out
        assert path == Path(expected)
        path.write_text("{}")


@pytest.mark.parametrize("name", ["check_planner", "campaign"])
def test_benches_start_with_it(tmp_path: Path, name: str) -> None:
    """The option's type is there where a bench is started from another folder."""
    command = [sys.executable, str(BENCH / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
