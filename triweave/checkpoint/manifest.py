"""The manifest of a checkpoint: every file with its size and hash. It is written last and believed first."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from triweave.checkpoint.durable import FileRecord, record_of
from triweave.checkpoint.store import (
    MANIFEST_FILE,
    DamagedCheckpoint,
    Store,
    plain_name,
    read_bytes,
    reason_of,
)

FORMAT = "triweave checkpoint 1"
_LIMIT_BYTES = 8 * 2**20
"""A manifest of 50,000 files."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    save_id: str
    """Drawn anew for every save: two saves of one step differ in it."""
    files: Mapping[str, FileRecord]
    run: str = ""
    """Identity of the run that wrote it (`checkpoint.owner`); empty where no run did."""

    def to_bytes(self) -> bytes:
        """The file: readable JSON, with a hash of all the rest of it."""
        body = _body(self)
        return (json.dumps({**body, "sha256": _hash(body)}, indent=1) + "\n").encode()


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: there is none, or it is not as it was written.
    """
    content = read_bytes(store, folder, MANIFEST_FILE, _LIMIT_BYTES)
    try:
        found = json.loads(content)
        claimed = found.pop("sha256")
        files = {plain_name(name): FileRecord(**record) for name, record in found["files"].items()}
        manifest = Manifest(str(found["save_id"]), files, str(found.get("run", "")))
        whole = claimed == _hash(found) and found == _body(manifest)
    # Damaged bytes may be any JSON, or none; brackets without end exhaust the reader's stack.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole or not all(_is_record(record) for record in manifest.files.values()):
        raise DamagedCheckpoint(MANIFEST_FILE, "is not as it was written")
    return manifest


def check_sizes(store: Store, folder: str, manifest: Manifest) -> None:
    """Look, without reading, whether every file is there in its size. Files that are not listed do not matter.

    Raises:
        DamagedCheckpoint: the first file that is not as it should be.
    """
    try:
        sizes = store.sizes(folder)
    except OSError as error:
        raise DamagedCheckpoint(folder, f"cannot be listed ({reason_of(error)})") from None
    for name, record in manifest.files.items():
        if name not in sizes:
            raise DamagedCheckpoint(name, "is missing")
        if sizes[name] != record.bytes:
            raise DamagedCheckpoint(name, f"has {sizes[name]:,} bytes and was written with {record.bytes:,}")


def check_file(store: Store, folder: str, name: str, record: FileRecord, *, fresh: bool = False) -> None:
    """Read a file and compare it with what was written.

    Raises:
        DamagedCheckpoint: it differs, or cannot be read.
    """
    try:
        with store.open(folder, name, fresh=fresh) as file:
            found = record_of(file)
    except OSError as error:
        raise DamagedCheckpoint(name, f"cannot be read ({reason_of(error)})") from None
    if found.bytes != record.bytes:
        raise DamagedCheckpoint(name, f"has {found.bytes:,} bytes and was written with {record.bytes:,}")
    if found.sha256 != record.sha256:
        raise DamagedCheckpoint(name, "has changed since it was written (SHA-256 differs)")


def manifest_of(store: Store, folder: str) -> Manifest:
    """A manifest of the files that are in a folder now, for one that was written in another way."""
    files = {}
    for name in store.sizes(folder):
        with store.open(folder, name) as file:
            files[name] = record_of(file)
    files.pop(MANIFEST_FILE, None)
    return Manifest(uuid.uuid4().hex, files)


def share_of(manifest: Manifest, rank: int, size: int) -> list[str]:
    """The files that one of `size` ranks reads, so that together they read all, each about as much."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
    return by_size[rank::size]


def _body(manifest: Manifest) -> dict[str, Any]:
    files = {name: asdict(record) for name, record in manifest.files.items()}
    run = {"run": manifest.run} if manifest.run else {}
    return {"format": FORMAT, "save_id": manifest.save_id, **run, "files": files}


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _is_record(record: FileRecord) -> bool:
    return type(record.bytes) is int and record.bytes >= 0 and isinstance(record.sha256, str)
