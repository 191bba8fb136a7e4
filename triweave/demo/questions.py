"""The demo's text: questions and answers about building in Sweden, in English, as chat records.

From the package zaragoza-construction-faq (CC BY 4.0): 503 questions with answers of 60 to 500 characters, clean
English, ready-made JSONL, and a vocabulary (bygglov, slutbesked, ROT) that a small model does not know, so training
shows. Read as a demo's text and not as advice: the package cites Swedish law and does not say who wrote the answers;
its English is a translation. Left out are the 62 answers that advertise the publisher and the later answers to a
question that comes twice.

chatterbot-corpus (BSD), the other package at hand, was not taken: its 1,050 technical-support conversations are 10
different ones, 86 of its 184 programming conversations repeat another one, and many answers are jokes or wrong
("h is to o as o is to v").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from triweave.demo.wheels import Wheel, find_or_fetch, read_member

WHEEL = Wheel(
    package="zaragoza-construction-faq",
    version="1.2.1",
    file="zaragoza_construction_faq-1.2.1-py3-none-any.whl",
    sha256="716a1999dd5ad8494c6a4e47d3510f017aa767ea9e55d3b348b0ad70b0e8d3d7",
)
_MEMBER = "zaragoza_construction_faq/data/faq-en.jsonl"
_PUBLISHER = "zaragoza"

ATTRIBUTION = (
    "Swedish Construction FAQ by Zaragoza AB, CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/). Changed: "
    "English edition only, as chat messages; repeated questions and answers that name the publisher are left out."
)

HELD_OUT_EVERY = 10
"""Every tenth question is validation. The package sorts by topic, so each topic is held out alike."""


def write_questions(cache: Path, folder: Path) -> tuple[Path, Path]:
    """Write `train.jsonl`, `validation.jsonl` and `ATTRIBUTION.txt` into `folder`; the split is always the same.

    A line is `{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}`.

    Args:
        cache: folder where the wheel lies or is fetched to.
        folder: destination, made when missing.

    Returns:
        The two JSONL files: (train, validation).

    Raises:
        RunFailed: pip could not fetch the wheel, or it is not the one the demo was made for.
    """
    lines = read_member(find_or_fetch(WHEEL, cache), _MEMBER).decode("utf-8").strip().split("\n")
    records = select_records(json.loads(line) for line in lines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ATTRIBUTION.txt").write_text(ATTRIBUTION + "\n", encoding="utf-8")
    held_out = [number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for number in range(len(records))]
    train = [record for record, held in zip(records, held_out, strict=True) if not held]
    validation = [record for record, held in zip(records, held_out, strict=True) if held]
    return _write_jsonl(folder / "train.jsonl", train), _write_jsonl(folder / "validation.jsonl", validation)


def select_records(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Chat records of the rows worth training on, in their order; a row has its question in `q`, its answer in `a`."""
    records: list[dict[str, Any]] = []
    seen: set[str] = set()
    for row in rows:
        question, answer = row["q"].strip(), row["a"].strip()
        if question.lower() in seen or _PUBLISHER in f"{question} {answer}".lower():
            continue
        seen.add(question.lower())
        records.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return records


def _write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text(lines, encoding="utf-8")
    return path
