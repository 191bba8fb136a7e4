"""What a checkpoint from somewhere else may hold; its manifest is made to fit, as whoever means harm would do."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fault_cases.hostile_case import BESIDE, Bait, Case
from fault_cases.small_checkpoints import reseal

from triweave.checkpoint import manifest as manifest_module
from triweave.checkpoint.damaged import damage
from triweave.checkpoint.kept import found
from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.places import locate
from triweave.errors import InputError, Problem
from triweave.groups import alone
from triweave.training.checkpoints import load_checkpoint
from triweave.training.engine import Engine

FILES = ("manifest.json", ".metadata", "__0_0.distcp", "progress.json", "random.json")


def checkpoint_cases(engine: Engine) -> list[Case]:
    """What a checkpoint from somewhere else may hold; its manifest is always made to fit."""

    def resume(folder: Path) -> None:
        # As `resume: auto` does: looked at whole, then loaded.
        for name in found(LocalStore(folder)):
            problem = damage(LocalStore(folder), name, alone())
            if problem is not None:
                raise InputError(Problem("resume", name, problem))
            load_checkpoint(folder / name, engine)

    def explicit(folder: Path) -> None:
        store, name = locate(folder / "step-1")
        if (problem := damage(store, name, alone())) is not None:
            raise InputError(Problem("resume", name, problem))
        load_checkpoint(folder / "step-1", engine)

    def sealed(change: Callable[[Path], None]) -> Callable[[Path], None]:
        def make(folder: Path) -> None:
            change(folder / "step-1")
            reseal(folder / "step-1")

        return make

    def contents(change: Callable[[Any, Path], Any]) -> Callable[[Path], None]:
        def make(step: Path) -> None:
            table = pickle.loads((step / ".metadata").read_bytes())  # noqa: S301 - written a moment ago
            (step / ".metadata").write_bytes(pickle.dumps(change(table, step)))

        return sealed(make)

    def place(**values: Any) -> Callable[[Path], None]:
        def change(table: Any, step: Path) -> Any:
            for info in table.storage_data.values():
                for key, value in values.items():
                    setattr(info, key, value)
            return table

        return contents(change)

    def shape(size: tuple[int, ...], whole: tuple[int, ...]) -> Callable[[Path], None]:
        def change(table: Any, step: Path) -> Any:
            entry = table.state_dict_metadata["weight.model.norm.weight"]
            entry.size, entry.chunks[0].sizes = torch.Size(whole), torch.Size(size)
            return table

        return contents(change)

    def entry(value: Callable[[Path], Any]) -> Callable[[Path], None]:
        def change(table: Any, step: Path) -> Any:
            table.state_dict_metadata["weight.model.norm.weight"] = value(step.parent)
            return table

        return contents(change)

    def archives(change: Callable[[list[tuple[str, bytes]], Path], list[tuple[str, bytes]]], method: int) -> Any:
        """Every stored tensor with other records, in the places where it was expected."""

        def spoil(table: Any, step: Path) -> Any:
            data, file = b"", step / "__0_0.distcp"
            old = file.read_bytes()
            for info in table.storage_data.values():
                part = step / "part"
                part.write_bytes(old[info.offset : info.offset + info.length])
                with zipfile.ZipFile(part) as archive:
                    records = [(name, archive.read(name)) for name in archive.namelist()]
                with zipfile.ZipFile(part, "w", method) as archive:
                    for name, content in change(records, step.parent):
                        archive.writestr(name, content)
                new = part.read_bytes().ljust(info.length, b"\0")
                info.offset, info.length = len(data), len(new)
                data += new
                part.unlink()
            file.write_bytes(data)
            return table

        return contents(spoil)

    def pickled_bait(records: list[tuple[str, bytes]], folder: Path) -> list[tuple[str, bytes]]:
        return [(name, pickle.dumps(Bait(folder)) if name.endswith("data.pkl") else data) for name, data in records]

    def zeros(records: list[tuple[str, bytes]], folder: Path) -> list[tuple[str, bytes]]:
        return [(name, bytes(2**24) if name.endswith("data/0") else data) for name, data in records]

    def manifest(change: Callable[[dict[str, Any]], object], *, signed: bool = True) -> Callable[[Path], None]:
        def make(folder: Path) -> None:
            path = folder / "step-1" / "manifest.json"
            body = json.loads(path.read_bytes())
            del body["sha256"]
            change(body)
            path.write_text(json.dumps({**body, "sha256": manifest_module._hash(body) if signed else ""}))

        return make

    def record(name: str, **values: Any) -> Callable[[Path], None]:
        good = {"bytes": 1, "sha256": "0" * 64}
        return manifest(lambda body: body["files"].update({name: good | values}))

    def text(name: str, content: str) -> Callable[[Path], None]:
        return sealed(lambda step: (step / name).write_text(content) and None)

    def unsealed(name: str, content: str) -> Callable[[Path], None]:
        return lambda folder: (folder / "step-1" / name).write_text(content) and None

    def link(name: str, target: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            path = folder / "step-1" / name
            path.unlink()
            path.symlink_to(target.format(parent=folder.parent))

        return change

    def pipe(name: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            (folder / "step-1" / name).unlink()
            os.mkfifo(folder / "step-1" / name)

        return change

    def sparse(name: str, size: int) -> Callable[[Path], None]:
        return lambda folder: os.truncate(folder / "step-1" / name, size)

    def whole_folder(folder: Path) -> None:
        shutil.rmtree(folder / "step-1")
        (folder / "step-1").symlink_to(folder.parent / BESIDE / "step-1")

    pickles: Mapping[str, Callable[[Path], bytes]] = {
        "a pickle that runs": lambda step: pickle.dumps(Bait(step.parent)),
        "a pickle that runs, old protocol": lambda step: pickle.dumps(Bait(step.parent), protocol=0),
        "a pickle that runs inside a list": lambda step: pickle.dumps([[{"a": Bait(step.parent)}]]),
        "a pickle that asks for builtins": lambda step: b"cbuiltins\neval\n(S'1'\ntR.",
        "a pickle that asks through an allowed module": lambda step: b"cpathlib\nos.mkdir\n.",
        "a pickle of a torch function": lambda step: b"ctorch\nload\n.",
        "two million lists": lambda step: b"]" * (2 * 2**20),
        "a pickle that ends early": lambda step: pickle.dumps(Bait(step.parent))[:-3],
        "a huge number": lambda step: b"\x8b" + struct.pack("<i", 2**31 - 1),
        "a string of 8 exabytes": lambda step: b"\x8e" + struct.pack("<Q", 2**63) + b".",
        "nothing": lambda step: b"",
    }

    def pickled(content: Callable[[Path], bytes]) -> Callable[[Path], None]:
        return sealed(lambda step: (step / ".metadata").write_bytes(content(step)) and None)

    nested = "[" * 100_000
    return [
        *(Case(f"contents: {name}", pickled(content), resume) for name, content in pickles.items()),
        Case("contents of 256 MiB", sparse(".metadata", 2**28), explicit),
        Case("per-rank contents that run", sealed(rank_contents), resume),
        Case("path to a folder beside", place(relative_path="../../beside/step-1/__0_0.distcp"), resume),
        Case("absolute path", place(relative_path="/etc/passwd"), resume),
        Case("path with a zero byte", place(relative_path="__0_0.distcp\0"), resume),
        Case("path that is the folder", place(relative_path="."), resume),
        Case("path that is no text", place(relative_path=5), resume),
        Case("negative place", place(offset=-5), resume),
        Case("place behind the end", place(offset=2**60), resume),
        Case("length beyond the end", place(length=2**60), resume),
        Case("length of nothing", place(length=0), resume),
        Case("transforms", place(transform_descriptors=["zstd"]), resume),
        Case("a shape of 10^12", shape((10**12,), (10**12,)), resume),
        Case("a part outside its tensor", shape((17,), (16,)), resume),
        Case("a shape that is larger", shape((16,), (10**12,)), resume),
        Case("an object in a tensor's place", entry(lambda folder: "text"), resume),
        Case("bait in a tensor's place", entry(Bait), resume),
        Case("a stored tensor that runs", archives(pickled_bait, zipfile.ZIP_STORED), resume),
        Case("a stored tensor that is compressed", archives(zeros, zipfile.ZIP_DEFLATED), resume),
        Case("data that are no archive", sealed(lambda step: overwrite(step, b"\x50\x4b\x05\x06" * 999)), resume),
        Case(
            "manifest: 100,000 brackets", lambda f: (f / "step-1" / "manifest.json").write_text(nested) and None, resume
        ),
        Case("manifest of 1 GiB", sparse("manifest.json", 2**30), resume),
        Case("manifest names a folder beside", record("../../beside/step-1/progress.json"), resume),
        Case("manifest names an absolute path", record("/etc/passwd"), resume),
        Case("manifest: negative size", record("progress.json", bytes=-1), resume),
        Case("manifest: size is text", record("progress.json", bytes="1"), resume),
        Case("manifest: hash is a list", record("progress.json", sha256=[]), resume),
        Case("manifest: further keys", manifest(lambda body: body.update(run="rm")), resume),
        Case("manifest without hash", manifest(lambda body: body.update(save_id="x"), signed=False), resume),
        Case("progress: 100,000 brackets", text("progress.json", nested), resume),
        Case("progress: a step that is text", text("progress.json", '{"step": "rm"}'), resume),
        Case("progress: infinite", text("progress.json", '{"step": Infinity, "seed": 1, "global_batch": 1}'), resume),
        Case("progress of 64 MiB", sealed(lambda step: os.truncate(step / "progress.json", 2**26)), resume),
        Case("random states: 100,000 brackets", text("random.json", nested), resume),
        Case("random states that are none", text("random.json", '[{"python": 1}]'), resume),
        Case("random states of another kind", text("random.json", '[{"python": [3, [1], null]}]'), resume),
        *(Case(f"{name} is a link", link(name, "{parent}/beside/step-1/" + name), resume) for name in FILES),
        Case("a link to /etc/passwd", link("run.yaml", "/etc/passwd"), resume),
        *(Case(f"{name} is a pipe", pipe(name), resume) for name in FILES),
        Case("the folder is a link", whole_folder, resume),
        Case("latest leads elsewhere", lambda f: (f / "latest").write_text("../beside/step-1\n") and None, resume),
        Case("latest is a link", hint_link, resume),
    ]


def rank_contents(step: Path) -> None:
    """torch falls back to this name where `.metadata` is not there."""
    (step / ".metadata").unlink()
    (step / "__0.metadata").write_bytes(pickle.dumps(Bait(step.parent)))


def overwrite(step: Path, content: bytes) -> None:
    """Data of the same size."""
    size = (step / "__0_0.distcp").stat().st_size
    (step / "__0_0.distcp").write_bytes((content * (size // len(content) + 1))[:size])


def hint_link(folder: Path) -> None:
    """A hint that is read from elsewhere."""
    (folder / "latest").unlink()
    (folder / "latest").symlink_to(folder.parent / BESIDE / "step-1" / "progress.json")
