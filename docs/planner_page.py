"""Writes docs/planner.md anew: its blocks `$ triweave plan ...` and its table of layouts, as the planner answers now.

    python docs/planner_page.py

A block repeats what `triweave plan` prints for the question of the page, long lines folded, and of the list of other
grids the first few. A row of the table is one layout. The words around them are for a person to read again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

PAGE = Path(__file__).parent / "planner.md"
QUESTION = "--model meta-llama/Llama-3-70B --cluster 4x8xh100-80gb --seq 4096 --global-batch 128"
WIDTH = 118
OTHER_GRIDS = 7

BLOCK = re.compile(r"^```\n\$ triweave plan ([^\n]*)\n.*?\n```$", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\| `((?:tp|dp)=[^`]*)` \| [\d.]+ \| [\d.]+ \| [\d.]+ % \|$", re.MULTILINE)


def answer(words: str) -> list[str]:
    """The lines that `triweave plan` prints; `...` among the words is the page's question."""
    command = [sys.executable, "-m", "triweave", "plan", *words.replace("...", QUESTION).split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    # 1 is an answer too: the layout does not fit.
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    return done.stdout.rstrip().splitlines()


def folded(line: str) -> Iterator[str]:
    """A line in pieces that fit the page; bars of memory stay whole."""
    while len(line) > WIDTH and "█" not in line:
        at = line.rfind(" ", 0, WIDTH + 1)
        yield line[:at]
        line = "     " + line[at + 1 :]
    yield line


def block(found: re.Match[str]) -> str:
    """One printed answer: all of the page's own search, of one layout all but the question, of others the layout."""
    words = found[1]
    lines = [piece for line in answer(words) for piece in folded(line)]
    if not words.startswith("..."):
        lines = [*lines[2 : lines.index("", 2)], "..."]
    elif "--layout" in words:
        lines = lines[2:]
    if "other grids:" in lines:
        first = lines.index("other grids:") + 1
        starts = (at for at in range(first, len(lines)) if lines[at].startswith("   tp"))
        end = next(islice(starts, OTHER_GRIDS, None), None)
        if end is not None:
            lines = [*lines[:end], "   ..."]
    return "\n".join(["```", f"$ triweave plan {words}", *lines, "```"])


def row(found: re.Match[str]) -> str:
    """One layout of the table: what its first stage needs, its step and its MFU."""
    text = "\n".join(answer(f"... --layout {found[1]}"))
    figures = (r"stage 0 needs ([\d.]+)", r"step ([\d.]+) s", r"MFU ([\d.]+) %")
    needs, step, mfu = (re.search(figure, text)[1] for figure in figures)  # type: ignore[index]
    return f"| `{found[1]}` | {needs} | {step} | {mfu} % |"


if __name__ == "__main__":
    PAGE.write_text(ROW.sub(row, BLOCK.sub(block, PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
