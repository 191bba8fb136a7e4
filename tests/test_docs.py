"""The pages say what is so: links lead somewhere, commands print what is shown, tables are the code's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import save_tokenizer

from triweave.checkpoint.safetensors_file import SafetensorsFile
from triweave.config.foreign_keys import TABLE
from triweave.config.kinds import keys
from triweave.config.schema import Run
from triweave.model_spec import spec_from_folder

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")])
IN_A_FOLDER_OF_ITS_OWN = (DOCS / "faq.md", DOCS / "coming-from.md", DOCS / "launch.md")
IN_THE_REPOSITORY = (
    DOCS / "context-parallel.md",
    DOCS / "path-of-a-tensor.md",
    *sorted((DOCS / "decisions").glob("[0-9]*.md")),
)

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TOOLS = {
    "Megatron-LM": ("Megatron-LM",),
    "torchtitan": ("torchtitan",),
    "HF Trainer and TRL": ("HF Trainer", "TRL"),
    "Axolotl": ("Axolotl",),
    "LLaMA-Factory": ("LLaMA-Factory",),
    "torchtune": ("torchtune",),
}
"""Heads of the columns in coming-from.md, and how the code calls these tools."""


def relative(path: Path) -> str:
    """How a page is named in a test's id."""
    return path.relative_to(ROOT).as_posix()


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Links of `text`, as if it stood in `page`, that lead to no file or to no heading."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link of a page leads to a file that is there, and to a heading that it has."""
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_broken_link_is_seen() -> None:
    """A link to no file, and one to no heading, are each named."""
    text = "[a](nowhere.md) [b](data.md#nowhere) [c](data.md#files) [d](https://example.org/x)"
    assert broken_links(DOCS / "index.md", text) == ["nowhere.md", "data.md#nowhere"]


def test_index_names_every_page() -> None:
    """Every page of the documentation is reached from its index."""
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", (DOCS / "index.md").read_text())}
    assert {page for page in DOCS.rglob("*.md") if page.name != "index.md"} - linked == set()


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """A command of a `console` block, and what the page says that it prints."""

    page: Path
    command: str
    output: str


def shown(*pages: Path) -> Iterator[Shown]:
    """Every command of the pages' `console` blocks: `$` begins it, `>` goes on with it, the rest is its output."""
    for page in pages:
        blocks = re.findall(r"^( *)```console\n(.*?)^ *```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        for indent, block in blocks:
            lines = textwrap.dedent(indent + block.removeprefix(indent)).splitlines()
            for first in [number for number, line in enumerate(lines) if line.startswith("$ ")]:
                rest = lines[first + 1 :]
                more = next((n for n, line in enumerate(rest) if not line.startswith("> ")), len(rest))
                end = next((n for n, line in enumerate(rest) if line.startswith("$ ")), len(rest))
                command = "\n".join([lines[first][2:], *(line[2:] for line in rest[:more])])
                yield Shown(page, command, "\n".join(rest[more:end]).strip())


def printed(command: str, folder: Path) -> str:
    """What a command prints in `folder`, errors included."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, what they read, and the files that the pages show by name."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").symlink_to(ROOT / "examples")
    model = save_tokenizer(folder / "models" / "SmolLM2-135M-Instruct")
    (model / "config.json").write_text(json.dumps(SMOLLM2))
    # A header and a hole: the size of the real weights, and no disk.
    SafetensorsFile(model / "model.safetensors", list(spec_from_folder(model).tensors()), torch.float32)
    (folder / "data").mkdir()
    (folder / "data" / "faq.jsonl").write_text('{"prompt": "Hi", "completion": "Hello"}\n')
    for page in IN_A_FOLDER_OF_ITS_OWN:
        for name, text in re.findall(r"^```\w+ (\S+)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def command_id(value: Shown) -> str:
    """A test's id: page and command."""
    return f"{value.page.stem[:11]}: {value.command[:60]}"


@pytest.mark.parametrize("case", list(shown(*IN_A_FOLDER_OF_ITS_OWN)), ids=command_id)
def test_message_is_the_one_shown(case: Shown, folder: Path) -> None:
    """A command of the pages about messages prints, to the letter, what the page shows."""
    assert printed(case.command, folder) == case.output


@pytest.mark.parametrize("case", list(shown(*IN_THE_REPOSITORY)), ids=command_id)
def test_figure_is_the_one_shown(case: Shown) -> None:
    """A command of the pages about the code prints the figures that the page shows."""
    assert printed(case.command, ROOT) == case.output


def test_wrong_output_is_seen(tmp_path: Path) -> None:
    """Commands are cut out with their lines and their output, and one that prints something else is told apart."""
    page = tmp_path / "page.md"
    page.write_text(
        '- x\n\n  ```console\n  $ python -c "\n  > print(1)\n  > print(2)"\n  1\n  2\n  $ echo 3\n  4\n  ```\n'
    )
    first, second = shown(page)
    assert printed(first.command, tmp_path) == first.output == "1\n2"
    assert printed(second.command, tmp_path) == "3" != second.output


# --- tables and pictures ----------------------------------------------------------------------------------------------


def told() -> Iterator[tuple[str, str | None, str]]:
    """Tool, our key and their key, from every cell of the tables in coming-from.md."""
    heads: list[str] = []
    for line in (DOCS / "coming-from.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[:1] == ["here"] and set(cells[1:-1]) <= set(TOOLS):
            heads = cells[1:-1]
        elif not cells:
            heads = []
        else:
            for head, cell in zip(heads, cells[1:], strict=False):
                for theirs in re.findall(r"`([^`]+)`", cell):
                    yield (
                        head,
                        None if cells[0] == "nothing" else cells[0].strip("`"),
                        theirs.strip("-").replace("-", "_"),
                    )


def test_foreign_keys_are_the_codes() -> None:
    """Each tool's table names all of its keys that the loader knows, with the loader's answers, and no other."""
    ours = {(key.name, key.name.rpartition(".")[2]) for key in keys(Run)}
    # A key that is spelt the same here is no foreign one; the page may say where it stands.
    page = {(head, mine, theirs) for head, mine, theirs in told() if (mine, theirs) not in ours}
    # Axolotl's own switch of our name means something else, which the page says in words.
    spelt_alike = {name for _, name in ours}
    code = {
        (head, row.ours, theirs)
        for head, tools in TOOLS.items()
        for row in TABLE
        for theirs, names in row.names.items()
        if theirs not in spelt_alike and set(tools) & set(re.split(r", (?:and )?| and | of ", names))
    }
    assert page == code


def test_grid_is_current() -> None:
    """The picture of the README is what the layout gives today; it says in words what it shows, and loads nothing."""
    make = [sys.executable, str(DOCS / "images" / "make_grid.py"), "--check"]
    assert subprocess.run(make, check=False).returncode == 0
    text = (DOCS / "images" / "grid.svg").read_text(encoding="utf-8")
    svg = ElementTree.fromstring(text)  # noqa: S314 - our own file
    space = "{http://www.w3.org/2000/svg}"
    assert svg.get("role") == "img"
    assert all(svg.find(f"{space}{name}").text for name in ("title", "desc"))
    assert len(text.encode()) < 40_000
    assert not re.search(r"href|@import|url\(|@font-face", text)
