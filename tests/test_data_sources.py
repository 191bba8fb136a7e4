"""Files to records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_tokenizer import write_jsonl

from triweave.data.problems import Problems
from triweave.data.sources import MAX_TEXT_BYTES, Record, data_files, read_records
from triweave.errors import InputError


def read(*paths: Path) -> list[Record]:
    problems = Problems()
    records = list(read_records(data_files([str(path) for path in paths]), problems))
    problems.raise_any()
    return records


def refusal(*paths: Path) -> str:
    with pytest.raises(InputError) as raised:
        read(*paths)
    return str(raised.value)


def test_jsonl_is_read_with_its_line_numbers(tmp_path: Path) -> None:
    """Empty lines are passed over, and still counted; a byte order mark and U+2028 inside a string do no harm."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": "b\xe2\x80\xa8c"}')
    assert read(path) == [Record({"text": "a"}, f"{path}:1"), Record({"text": "b\u2028c"}, f"{path}:4")]


def test_json_list_and_text_file_are_read(tmp_path: Path) -> None:
    """A .json file is a list of records; a .txt file is one document, and an empty one is none."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x"}, {"text": "y"}]))
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    (tmp_path / "c.txt").write_text(" \n")
    assert [record.value["text"] for record in read(tmp_path)] == ["x", "y", "one\ntwo\n"]
    assert read(tmp_path)[1].where.endswith("a.json record 2")


def test_folder_is_sorted_and_takes_each_file_once(tmp_path: Path) -> None:
    """Links to files and folders, a link that leads in a circle, and a file that is named again add nothing."""
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / ".hidden").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden/d.jsonl"):
        write_jsonl(data / name, [{"text": name}])
    (data / "readme.md").write_text("not data")
    (data / "z.jsonl").symlink_to(data / "a.jsonl")
    (data / "round").symlink_to(data)
    (data / "twin").symlink_to(data / "sub")
    texts = [record.value["text"] for record in read(data / "sub", data, data / "b.jsonl")]
    assert texts == ["sub/c.jsonl", "a.jsonl", "b.jsonl"]
    assert [record.value["text"] for record in read(data)] == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    """Broken JSON, another value than an object, deep nesting and bytes that are not UTF-8: file and line of each."""
    path = tmp_path / "a.jsonl"
    deep = b"[" * 100_000 + b"]" * 100_000
    path.write_bytes(b'{"text": "fine"}\n{"text": \n[1]\n{"text": "\xe9"}\n' + deep + b"\n")
    lines = refusal(path).splitlines()
    assert [line.split(": data.train: ")[0] for line in lines] == [f"{path}:{n}" for n in (2, 3, 4, 5)]
    assert "is not JSON (Expecting value at column" in lines[0]
    assert "must be a JSON object, not a list" in lines[1]
    assert "is not UTF-8 text (byte 0xe9 at offset 10)" in lines[2]
    assert "nested too deep" in lines[3]


def test_wholly_wrong_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Twenty wrong lines are enough."""
    path = tmp_path / "a.jsonl"
    path.write_text("wrong\n" * 1000)
    assert len(refusal(path).splitlines()) == 20


def test_json_lines_called_json_are_told_their_name(tmp_path: Path) -> None:
    """A .json file of one object a line is the usual mistake: the message says what it must be called."""
    path = write_jsonl(tmp_path / "a.json", [{"text": "a"}, {"text": "b"}])
    assert "a file of one object a line must be called .jsonl" in refusal(path)
    path.write_text('{"text": "a"}')
    assert "must hold a list of JSON objects, not an object" in refusal(path)


def test_every_wrong_path_is_named(tmp_path: Path) -> None:
    """A missing file gets its nearest neighbour, a foreign one the extensions, and an empty folder is no data."""
    write_jsonl(tmp_path / "chats.jsonl", [])
    (tmp_path / "table.xlsx").write_text("")
    (tmp_path / "empty").mkdir()
    lines = refusal(tmp_path / "chat.jsonl", tmp_path / "table.xlsx", tmp_path / "empty").splitlines()
    assert lines[0].endswith(f"does not exist; nearest: {tmp_path / 'chats.jsonl'}")
    assert "must be a .jsonl, .json, .parquet, .txt file" in lines[1]
    assert "holds no .jsonl, .json, .parquet, .txt file" in lines[2]


def test_text_that_is_no_utf8_or_too_large_is_refused(tmp_path: Path) -> None:
    """Latin-1 is not guessed, and a file that would fill the memory is not read."""
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    lines = refusal(tmp_path).splitlines()
    assert "is not UTF-8 text (byte 0xe9 at offset 0)" in lines[0]
    assert "cut it into several files" in lines[1]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow is no requirement of this package."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    assert "needs pyarrow to be read; nearest: pip install pyarrow" in refusal(tmp_path)


def test_parquet_is_read(tmp_path: Path) -> None:
    """With pyarrow a row is a record; a file that is no Parquet is named."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [{"role": "user", "content": f"{i}"}]} for i in range(600)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    records = read(tmp_path)
    assert [record.value for record in records] == rows
    assert records[-1].where.endswith("a.parquet record 600")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    assert "is not a readable Parquet file" in refusal(tmp_path)
