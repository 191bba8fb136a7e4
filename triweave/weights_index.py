"""What is in a folder of safetensors files: every tensor's type, shape and place, without reading a weight.

A safetensors file is 8 bytes (the header's length, little-endian), a JSON header, and the tensors one after the
other. This reads the headers alone, trusts nothing they say, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from triweave.errors import InputError, Problem
from triweave.json_file import parse_json_object, read_json_object
from triweave.model_spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_HEADER_BYTES = 8 * 2**20
"""Of a header, or of the index: 60,000 tensors. The safetensors library allows 100 MB, which takes it 15 s and 1.3 GB
to read; Llama-3.1-405B has 1,138 tensors, and the header of its largest file less than 10 kB."""

DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one element, by the format's own names of types."""

WEIGHT_DTYPES = ("BF16", "F16", "F32")

_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
_LFS_POINTER = b"version https://git-lfs"
_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file and the bytes `[begin, end)` of the file that hold it, row-major."""

    name: str
    dtype: str
    """The format's name of the type: BF16, F16, F32, ..."""
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, by name.

    Raises:
        InputError: not a safetensors file; a header over 8 MiB or beyond the end of the file; a tensor whose bytes
            do not follow the one before, or do not match its type and shape; a file shorter or longer than its
            header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise _wrong(path, "is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
            if len(start) < 8:
                raise _wrong(path, f"has {size} bytes; a safetensors file has more than 8")
            header_bytes = int.from_bytes(start[:8], "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise _wrong(path, f"says that its header has {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
            if 8 + header_bytes > size:
                raise _cut_short(path, size, f"{8 + header_bytes} bytes for the header alone")
            file.seek(8)
            raw = file.read(header_bytes)
    except OSError as error:
        raise _wrong(path, f"cannot be read ({error.strerror})") from None
    entries = _entries(path, parse_json_object(raw, path, "model.path", "header"), data=8 + header_bytes)
    _check_extent(path, entries.values(), data=8 + header_bytes, size=size)
    return entries


def weights_index(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a Hugging Face folder, by name: of `model.safetensors`, or of the shards its index lists.

    Raises:
        InputError: no safetensors weights; an index that names files outside the folder, a shard that is missing
            or damaged, a tensor that its shard does not hold. All of them at once.
    """
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise InputError(_no_weights(folder))
    weight_map = _read_weight_map(folder / INDEX_FILE)
    problems: list[Problem] = []
    found: dict[str, TensorEntry] = {}
    for file_name in sorted(set(weight_map.values())):
        listed = [name for name, holder in weight_map.items() if holder == file_name]
        if not (folder / file_name).is_file():
            rule = f"is listed in {INDEX_FILE} (for {some_names(listed)}) and is not there"
            problems.append(Problem("model.path", folder / file_name, rule))
            continue
        try:
            header = read_header(folder / file_name)
        except InputError as error:
            problems.extend(error.problems)
            continue
        absent = [name for name in listed if name not in header]
        if absent:
            problems.append(
                Problem("model.path", folder / file_name, f"lacks {some_names(absent)}, which {INDEX_FILE} lists")
            )
        found.update((name, header[name]) for name in listed if name in header)
    if problems:
        raise InputError(problems)
    return {name: found[name] for name in weight_map}


def weight_problems(folder: Path, spec: ModelSpec) -> list[Problem]:
    """What stops the folder's weights from being `spec`'s; empty when they fit. Only headers are read."""
    try:
        index = weights_index(folder)
    except InputError as error:
        return list(error.problems)
    return index_problems(index, spec, folder)


def index_problems(index: Mapping[str, TensorEntry], spec: ModelSpec, folder: Path) -> list[Problem]:
    """The part of `weight_problems` that compares: missing and unknown tensors, wrong shapes, wrong types.

    A tensor that the model computes itself (`rotary_emb.inv_freq`) or shares (`lm_head.weight`, when tied) may be
    there and is not read.
    """
    expected = {tensor.name: tensor.shape for tensor in spec.tensors()}
    present = {name: entry for name, entry in index.items() if name in expected}
    missing = [name for name in expected if name not in index]
    unknown = [name for name in index if name not in expected and not _is_harmless(name)]
    reshaped = [
        f"{name} is {_shape(entry.shape)} and must be {_shape(expected[name])}"
        for name, entry in present.items()
        if entry.shape != expected[name]
    ]
    retyped = [f"{name} is {entry.dtype}" for name, entry in present.items() if entry.dtype not in WEIGHT_DTYPES]
    rules = []
    if missing:
        rules.append(
            f"lacks {len(missing)} of the {len(expected)} tensors that config.json asks for: {some_names(missing)}"
        )
    if reshaped:
        rules.append(f"has weights of another shape than config.json says: {some_names(reshaped)}")
    if retyped:
        rules.append(f"has weights that are none of {', '.join(WEIGHT_DTYPES)}: {some_names(retyped)}")
    if unknown:
        rules.append(f"has tensors that are no part of a {spec.architecture}: {some_names(unknown)}")
    return [Problem("model.path", folder, rule) for rule in rules]


def _is_harmless(name: str) -> bool:
    # A head that is not expected is a tied one.
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _entries(path: Path, header: Mapping[str, Any], data: int) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for name, described in header.items():
        if name == "__metadata__":
            continue
        fields = described if isinstance(described, dict) else {}
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not (isinstance(dtype, str) and _whole_numbers(shape) and _whole_numbers(offsets) and len(offsets) == 2):
            raise _wrong(path, f"describes {name!r} without a dtype, a shape and two data_offsets")
        if dtype not in DTYPE_BYTES:
            raise _wrong(path, f"holds {name!r} as {dtype}, which is not one of {', '.join(DTYPE_BYTES)}")
        begin, end = offsets
        needed = DTYPE_BYTES[dtype]
        for length in shape:
            needed *= length
        if end - begin != needed:
            raise _wrong(path, f"gives {name!r} {end - begin} bytes; {dtype} of shape {_shape(shape)} takes {needed}")
        entries[name] = TensorEntry(name, dtype, tuple(shape), path, data + begin, data + end)
    return entries


def _check_extent(path: Path, entries: Iterable[TensorEntry], data: int, size: int) -> None:
    expected = data
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != expected:
            raise _wrong(path, f"puts {entry.name!r} at byte {entry.begin}; the tensor before it ends at {expected}")
        expected = entry.end
    if size < expected:
        raise _cut_short(path, size, f"{expected}")
    if size > expected:
        raise _wrong(path, f"has {size} bytes and its header describes only {expected}")


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, "model.path", MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise _wrong(path, "has no weight_map from tensor names to file names")
    outside = sorted({name for name in weight_map.values() if not _is_plain_name(name)})
    if outside:
        shown = ", ".join(repr(name) for name in outside[:_NAMES_SHOWN])
        raise _wrong(path, f"may only name .safetensors files that lie beside it, not {shown}")
    return weight_map


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not any(character in name for character in "/\\\0:")


def _no_weights(folder: Path) -> Problem:
    if not folder.is_dir():
        return Problem("model.path", folder, "is not a folder")
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if pickles:
        rule = (
            f"has {pickles[0]}, a pickle that can run code when it is opened and is never read here; save it again "
            f"as {SINGLE_FILE} with `AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`"
        )
        return Problem("model.path", folder, rule)
    return Problem("model.path", folder, f"has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    # At most 8 numbers below 2^63, so that no product of a hostile header takes minutes.
    return isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _wrong(path: Path, rule: str) -> InputError:
    return InputError(Problem("model.path", path, rule))


def _cut_short(path: Path, size: int, promised: str) -> InputError:
    return _wrong(path, f"is a safetensors file cut short: it has {size} bytes and its header promises {promised}")


def _shape(shape: Iterable[int]) -> str:
    return "[" + ", ".join(str(length) for length in shape) + "]"


def some_names(names: list[str]) -> str:
    """The first few, for a message, and how many more there are."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
