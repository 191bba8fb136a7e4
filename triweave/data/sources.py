"""Files to records: .jsonl, .json, .parquet and .txt, or folders of them, read as a stream.

A record is a JSON object. A `.txt` file is one record, `{"text": ...}`: one file, one document.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triweave.data.problems import Problems
from triweave.errors import InputError, Problem, closest

EXTENSIONS = (".jsonl", ".json", ".parquet", ".txt")

MAX_TEXT_BYTES = 16 * 2**20
"""Largest .txt file. Tokenising one takes up to 200 times its size in memory (measured with tokenizers 0.23)."""

MAX_LINE_BYTES = 64 * 2**20
"""Largest line of a .jsonl file: a record. A file without line ends would be read into memory whole."""

MAX_JSON_BYTES = 2**30
"""Largest .json file, which takes up to ten times its size in memory. A .jsonl file is read line by line."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """One record and where it stands: `chats.jsonl:17` counts lines, `chats.json record 17` counts records."""

    value: dict[str, Any]
    where: str


def data_files(paths: Sequence[str], key: str = "data.train") -> tuple[Path, ...]:
    """The files behind `paths`, in the order given; inside a folder sorted by path, hidden ones left out.

    A file that several names or links lead to is taken once.

    Raises:
        InputError: a path does not exist, has another extension, or is a folder without any data file.
    """
    problems: list[Problem] = []
    found: dict[str, Path] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = _walk(path)
            if not inside:
                problems.append(Problem(key, name, f"holds no {', '.join(EXTENSIONS)} file"))
        elif not path.exists():
            problems.append(Problem(key, name, "does not exist", _neighbour(path)))
            continue
        elif path.suffix.lower() not in EXTENSIONS:
            problems.append(Problem(key, name, f"must be a {', '.join(EXTENSIONS)} file or a folder of them"))
            continue
        else:
            inside = [path]
        for file in inside:
            found.setdefault(os.path.realpath(file), file)
    if not paths:
        problems.append(Problem(key, "nothing", "must name at least one file"))
    if problems:
        raise InputError(problems)
    return tuple(found.values())


def read_records(files: Sequence[Path], problems: Problems, key: str = "data.train") -> Iterator[Record]:
    """Every record of `files` in order. Rows that cannot be read go to `problems` and are passed over.

    Raises:
        InputError: a .parquet file, and pyarrow is not installed.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".txt": _read_text}
    for file in files:
        yield from readers[file.suffix.lower()](file, problems, key)


def _walk(folder: Path) -> list[Path]:
    """Data files under `folder`. Linked folders are entered, each real one only once."""
    files: list[Path] = []
    entered = {os.path.realpath(folder)}
    for root, folders, names in os.walk(folder, followlinks=True):
        visible = sorted(name for name in folders if not name.startswith("."))
        folders.clear()
        for name in visible:
            real = os.path.realpath(os.path.join(root, name))
            if real not in entered:
                entered.add(real)
                folders.append(name)
        files.extend(
            Path(root, name) for name in names if not name.startswith(".") and name.lower().endswith(EXTENSIONS)
        )
    return sorted(files, key=lambda file: file.relative_to(folder).parts)


def _neighbour(path: Path) -> str | None:
    """The file beside `path` whose name is most like it."""
    if not path.parent.is_dir():
        return None
    name = closest(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    return None if name is None else str(path.parent / name)


def _decode(data: bytes) -> str:
    """UTF-8 text; a decoding error says at which byte.

    Raises:
        ValueError: `data` is not UTF-8.
    """
    try:
        return data.removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {data[error.start]:#04x} at offset {error.start})") from None


def _parse(data: bytes) -> Any:
    """JSON value of `data`.

    Raises:
        ValueError: `data` is not UTF-8, not JSON, or nested too deep.
    """
    text = _decode(data)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("is JSON nested too deep") from None


def _read_jsonl(file: Path, problems: Problems, key: str) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number in itertools.count(1):
            line = lines.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            where = f"{file}:{number}"
            if len(line) > MAX_LINE_BYTES:
                rule = f"is a line of more than {MAX_LINE_BYTES:,} bytes; the rest of the file is not read"
                problems.add(Problem(key, None, rule, where=where))
                return
            if not line.strip():
                continue
            try:
                value = _parse(line)
            except ValueError as error:
                problems.add(Problem(key, None, str(error), where=where))
                continue
            if isinstance(value, dict):
                yield Record(value, where)
            else:
                problems.add(Problem(key, None, f"must be a JSON object, not {_kind(value)}", where=where))


def _read_json(file: Path, problems: Problems, key: str) -> Iterator[Record]:
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        rule = f"has {size:,} bytes, more than {MAX_JSON_BYTES:,}; write it as .jsonl, an object a line"
        problems.add(Problem(key, None, rule, where=str(file)))
        return
    try:
        values = _parse(file.read_bytes())
    except ValueError as error:
        hint = "; a file of one object a line must be called .jsonl" if "Extra data" in str(error) else ""
        problems.add(Problem(key, None, f"{error}{hint}", where=str(file)))
        return
    if not isinstance(values, list):
        problems.add(Problem(key, None, f"must hold a list of JSON objects, not {_kind(values)}", where=str(file)))
        return
    for number, value in enumerate(values, start=1):
        where = f"{file} record {number}"
        if isinstance(value, dict):
            yield Record(value, where)
        else:
            problems.add(Problem(key, None, f"must be a JSON object, not {_kind(value)}", where=where))


def _read_parquet(file: Path, problems: Problems, key: str) -> Iterator[Record]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(Problem(key, file, "needs pyarrow to be read", "pip install pyarrow")) from None
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(value, f"{file} record {number}")
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        problems.add(Problem(key, None, f"is not a readable Parquet file ({error})", where=str(file)))


def _read_text(file: Path, problems: Problems, key: str) -> Iterator[Record]:
    size = file.stat().st_size
    if size > MAX_TEXT_BYTES:
        rule = f"is one document of {size:,} bytes, more than {MAX_TEXT_BYTES:,}; cut it into several files"
        problems.add(Problem(key, None, rule, where=str(file)))
        return
    try:
        text = _decode(file.read_bytes())
    except ValueError as error:
        problems.add(Problem(key, None, str(error), where=str(file)))
        return
    if text.strip():
        yield Record({"text": text}, str(file))


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else "an object")
