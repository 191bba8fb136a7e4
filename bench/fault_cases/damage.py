"""Bits that flip, files that are cut, exchanged, lost or from elsewhere: each is found before anything is loaded.

A damage is good if it is found, or if the checkpoint loads bit for bit as it was written.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fault_cases.rows import Row
from fault_cases.small_checkpoints import save_on_two_ranks, small_engine, state_hash

from triweave.checkpoint.damaged import damage
from triweave.checkpoint.kept import found
from triweave.checkpoint.local_store import LocalStore
from triweave.groups import alone
from triweave.training.checkpoints import load_checkpoint
from triweave.training.engine import Engine

Damage = Callable[[Path], None]


def run(quick: bool, out: Path) -> list[Row]:
    """Damage copies of a checkpoint of two ranks, in every way."""
    where = out / "checkpoints"
    save_on_two_ranks(out, where, (1, 2))
    engine = small_engine(out / "model")
    load_checkpoint(where / "step-2", engine)
    bench = _Bench(engine, where, state_hash(engine))
    chance = random.Random(1)  # noqa: S311 - no secret
    count = 40 if quick else 400
    return [
        bench.row(
            "one bit flipped, anywhere in the data files", [flip(where, chance, "*.distcp") for _ in range(count)]
        ),
        bench.row("one bit flipped in the small files", [flip(where, chance, "[.mpr]*") for _ in range(count // 2)]),
        bench.row("512 bytes of zeros", [zeros(where, chance) for _ in range(count // 4)]),
        bench.row("cut: to nothing, to half, by a byte", list(cuts(where))),
        bench.row("bytes appended", [append(name) for name in files(where)]),
        bench.row("file lost", [lose(name) for name in files(where)]),
        bench.row("files of two ranks exchanged", [exchange("__0_0.distcp", "__1_0.distcp")]),
        bench.row("any two files exchanged", [exchange(*pair) for pair in itertools.combinations(files(where), 2)]),
        bench.row("file of another step in its place", [from_step_1(where, name) for name in files(where)]),
        bench.row("all data files of another step", [from_step_1(where, "__0_0.distcp", "__1_0.distcp")]),
        bench.row("file that does not belong there", [foreign]),
        hints(where, chance, count // 4),
    ]


class _Bench:
    def __init__(self, engine: Engine, where: Path, right: str) -> None:
        self._engine, self._where, self._right = engine, where, right

    def row(self, test: str, damages: list[Damage]) -> Row:
        seen = harmless = 0
        for inflict in damages:
            copy = self._where.parent / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self._where / "step-2", copy / "step-2")
            inflict(copy / "step-2")
            if damage(LocalStore(copy), "step-2", alone()) is not None:
                seen += 1
                continue
            load_checkpoint(copy / "step-2", self._engine)
            harmless += state_hash(self._engine) == self._right
        detail = f"{seen} found" + (f", {harmless} harmless: loaded bit for bit" if harmless else "")
        return Row(test, len(damages), seen + harmless, detail)


def files(where: Path) -> list[str]:
    """Names of a checkpoint's files."""
    return sorted(path.name for path in (where / "step-2").iterdir())


def flip(where: Path, chance: random.Random, pattern: str) -> Damage:
    """A random bit of the files that a pattern names, each byte as likely as any."""
    sizes = {path.name: path.stat().st_size for path in (where / "step-2").glob(pattern)}
    (name,) = chance.choices(list(sizes), list(sizes.values()))
    place, bit = chance.randrange(sizes[name]), chance.randrange(8)

    def inflict(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 1 << bit
        (folder / name).write_bytes(content)

    return inflict


def zeros(where: Path, chance: random.Random) -> Damage:
    """A block of a data file that reads as zeros."""
    name = chance.choice(["__0_0.distcp", "__1_0.distcp"])
    place = chance.randrange((where / "step-2" / name).stat().st_size - 512)

    def inflict(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place : place + 512] = bytes(512)
        (folder / name).write_bytes(content)

    return inflict


def cuts(where: Path) -> Iterator[Damage]:
    """Every file, shorter."""
    for name in files(where):
        size = (where / "step-2" / name).stat().st_size
        for left in (0, size // 2, size - 1):
            yield lambda folder, name=name, left=left: os.truncate(folder / name, left)  # type: ignore[misc]


def append(name: str) -> Damage:
    """A file that is longer than it was."""

    def inflict(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(bytes(16))

    return inflict


def lose(name: str) -> Damage:
    """A file that is gone."""
    return lambda folder: (folder / name).unlink()


def exchange(first: str, second: str) -> Damage:
    """Two files that have each other's name."""

    def inflict(folder: Path) -> None:
        (folder / first).rename(folder / "aside")
        (folder / second).rename(folder / first)
        (folder / "aside").rename(folder / second)

    return inflict


def from_step_1(where: Path, *names: str) -> Damage:
    """Files that were right, one step earlier."""

    def inflict(folder: Path) -> None:
        for name in names:
            shutil.copy(where / "step-1" / name, folder / name)

    return inflict


def foreign(folder: Path) -> None:
    """Files that nobody has listed, one of them as of a third rank."""
    (folder / "__2_0.distcp").write_bytes(bytes(100))
    (folder / ".nfs0001").write_bytes(b"")


def hints(where: Path, chance: random.Random, count: int) -> Row:
    """`latest` says anything at all: the newest checkpoint is found all the same."""
    copy = where.parent / "hints"
    shutil.copytree(where, copy)
    good = 0
    for _ in range(count):
        (copy / "latest").write_bytes(chance.choice([chance.randbytes(20), b"step-7\n", b"../step-1", b"step-1", b""]))
        good += found(LocalStore(copy)) == ["step-2", "step-1"]
    return Row("anything in `latest`", count, good, "it is a hint: the newest checkpoint is found")
