"""What triweave.weights_index finds in folders of safetensors files, whole and damaged ones."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_models import STYLES, tiny_llama

from triweave.errors import InputError
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.weights_index import INDEX_FILE, MAX_HEADER_BYTES, read_header, weight_problems, weights_index


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in one file; tests copy it before they damage it."""
    return tiny_llama(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files with an index."""
    return tiny_llama(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")


def copy(folder: Path, to: Path) -> Path:
    """A copy that a test may damage."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def write_file(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with any header, also a wrong one."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """One tensor's description in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Change the weight map of a folder's index."""
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def only_problem(folder: Path, spec: ModelSpec) -> str:
    """The text of the one problem that the folder has."""
    (problem,) = weight_problems(folder, spec)
    return str(problem)


@pytest.mark.parametrize("style", STYLES)
def test_weights_of_transformers_fit(style: str, tmp_path: Path) -> None:
    """Every style of folder that transformers writes fits the model that its config.json describes."""
    folder = tiny_llama(tmp_path / "model", **STYLES[style])
    assert weight_problems(folder, spec_from_folder(folder)) == []


def test_sharded_folder_lists_what_one_file_lists(single: Path, sharded: Path) -> None:
    """The same model has the same tensors, types and shapes in one file and in several."""
    one, many = weights_index(single), weights_index(sharded)
    assert {name: (e.dtype, e.shape) for name, e in one.items()} == {
        name: (e.dtype, e.shape) for name, e in many.items()
    }
    assert len({entry.file for entry in many.values()}) > 2
    assert weight_problems(sharded, spec_from_folder(sharded)) == []


DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_}


@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        min_size=1,
        max_size=5,
    )
)
def test_places_are_those_of_the_safetensors_library(
    shapes: dict[str, tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of any file that the library writes, the bytes at each entry's place are the tensor's."""
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    random = np.random.default_rng(0)
    arrays = {name: np.asarray(random.random(shape) * 9, DTYPES[dtype]) for name, (dtype, shape) in shapes.items()}
    safetensors.numpy.save_file(arrays, path)
    content = path.read_bytes()
    entries = read_header(path)
    assert entries.keys() == arrays.keys()
    for name, entry in entries.items():
        assert (entry.dtype, list(entry.shape)) == shapes[name]
        assert content[entry.begin : entry.end] == arrays[name].tobytes()


@given(cut=st.integers(0, 200), flips=st.lists(st.tuples(st.integers(0, 199), st.integers(1, 255)), max_size=4))
def test_damaged_file_is_refused_or_means_the_same_to_the_library(
    cut: int, flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes changed or cut off give an InputError, or a file the safetensors library reads with the same shapes."""
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(4, dtype=np.float16)}
    content = bytearray(safetensors.numpy.save(arrays))
    for place, mask in flips:
        content[place % len(content)] ^= mask
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    path.write_bytes(bytes(content[: len(content) - cut]))
    try:
        entries = read_header(path)
    except InputError:
        return
    with safe_open(path, framework="np") as opened:
        assert {name: list(entry.shape) for name, entry in entries.items()} == {
            name: opened.get_slice(name).get_shape()
            for name in opened.keys()  # noqa: SIM118 (not a dict)
        }


def test_file_cut_short_tells_both_lengths(single: Path, tmp_path: Path) -> None:
    """A download that stopped early is named as that, with the bytes there are and the bytes there should be."""
    folder = copy(single, tmp_path / "model")
    path = folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    problem = only_problem(folder, spec_from_folder(folder))
    assert "cut short" in problem
    assert f"{size - 100} bytes" in problem
    assert f"promises {size}" in problem


def test_file_with_more_than_its_header_says_is_refused(single: Path, tmp_path: Path) -> None:
    """Bytes after the last tensor mean that the file is not what its header describes."""
    folder = copy(single, tmp_path / "model")
    path = folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"x")
    assert f"has {size + 1} bytes and its header describes only {size}" in only_problem(
        folder, spec_from_folder(folder)
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "more than 8"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", f"the limit is {MAX_HEADER_BYTES}"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", f"the limit is {MAX_HEADER_BYTES}"),
        (struct.pack("<Q", 1000) + b"{}", "it has 10 bytes and its header promises 1008"),
        (struct.pack("<Q", 1000) + b'{"a": {"dty', "cut short: it has 19 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n", "git lfs pull"),
        (struct.pack("<Q", 9) + b'{"a":nul}', "not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 40_000) + b"[" * 40_000, "not JSON"),
        (struct.pack("<Q", 17) + b'{"a":{},  "a":{}}', "appears twice"),
    ],
)
def test_file_that_is_no_safetensors_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    """A wrong start or header gives one sentence that says what is wrong, never a traceback."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": tensor([2], 0, 4)}, 4, "takes 8"),
        ({"a": tensor([1], 4, 8)}, 8, "ends at"),
        ({"a": tensor([2], 0, 8), "b": tensor([1], 4, 8)}, 8, "ends at"),
        ({"a": tensor([2], 8, 0)}, 8, "-8 bytes"),
        ({"a": tensor([-1], 0, 4)}, 4, "without a dtype"),
        ({"a": tensor([1.0], 0, 4)}, 4, "without a dtype"),
        ({"a": tensor([2**62] * 9, 0, 4)}, 4, "without a dtype"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "without a dtype"),
        ({"a": 7}, 4, "without a dtype"),
        ({"a": tensor([1], 0, 4, "Q4_1")}, 4, "Q4_1"),
        ({"a": tensor([True], 0, 4)}, 4, "without a dtype"),
    ],
)
def test_header_that_contradicts_itself_is_refused(header: object, data: int, says: str, tmp_path: Path) -> None:
    """Holes, overlaps, impossible sizes and unknown types in a header are told and never used."""
    with pytest.raises(InputError, match=says):
        read_header(write_file(tmp_path / "a.safetensors", header, bytes(data)))


def test_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    """A shard that the index lists and the folder lacks is named, and with it every other damaged one."""
    folder = copy(sharded, tmp_path / "model")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    problems = [str(problem) for problem in weight_problems(folder, spec_from_folder(folder))]
    assert len(problems) == 2
    assert first.name in problems[0]
    assert "is not there" in problems[0]
    assert second.name in problems[1]
    assert "cut short" in problems[1]


def test_tensor_that_its_shard_lacks_is_named(sharded: Path, tmp_path: Path) -> None:
    """An index that points to a file without the tensor is told with the name of both."""
    folder = copy(sharded, tmp_path / "model")
    holder = weights_index(folder)["lm_head.weight"].file.name
    other = next(path.name for path in sorted(folder.glob("*.safetensors")) if path.name != holder)
    rewrite_index(folder, lambda weight_map: weight_map.update({"lm_head.weight": other}))
    problem = only_problem(folder, spec_from_folder(folder))
    assert other in problem
    assert "lacks lm_head.weight" in problem


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "C:\\x.safetensors", "a\0.safetensors", "x.bin"],
)
def test_index_cannot_lead_out_of_the_folder(name: str, sharded: Path, tmp_path: Path) -> None:
    """A file name with a path in it is refused, also when that file exists."""
    folder = copy(sharded, tmp_path / "model")
    write_file(tmp_path / "outside.safetensors", {"a": tensor([1], 0, 4)}, bytes(4))
    rewrite_index(folder, lambda weight_map: weight_map.update({"lm_head.weight": name}))
    assert "lie beside it" in only_problem(folder, spec_from_folder(folder))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\udcff"])
def test_broken_index_is_refused(content: str, sharded: Path, tmp_path: Path) -> None:
    """An index that is no JSON object with a weight map is one problem."""
    folder = copy(sharded, tmp_path / "model")
    (folder / INDEX_FILE).write_bytes(content.encode(errors="surrogateescape"))
    assert INDEX_FILE in only_problem(folder, spec_from_folder(folder))


def test_pickled_weights_are_never_read(single: Path, tmp_path: Path) -> None:
    """A folder with only pytorch_model.bin is told why it is not read and how to save it again."""
    folder = copy(single, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    spec = spec_from_folder(folder)
    assert "neither model.safetensors nor" in only_problem(folder, spec)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickle" in only_problem(folder, spec)
    assert "save_pretrained" in only_problem(folder, spec)
    assert "not a folder" in only_problem(folder / "nowhere", spec)


def test_every_wrong_tensor_is_told_at_once(single: Path, tmp_path: Path) -> None:
    """Missing, reshaped, retyped and unknown tensors are four problems of one answer, with both shapes."""
    folder = copy(single, tmp_path / "model")
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.norm.weight"] = torch.zeros(63)
    weights["lm_head.weight"] = weights["lm_head.weight"].double()
    weights["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
    safetensors.torch.save_file(weights, path)
    missing, reshaped, retyped, unknown = (str(p) for p in weight_problems(folder, spec_from_folder(folder)))
    assert "lacks 1 of the 39 tensors" in missing
    assert "model.layers.1.mlp.up_proj.weight" in missing
    assert "model.norm.weight is [63] and must be [64]" in reshaped
    assert "lm_head.weight is F64" in retyped
    assert "model.layers.0.self_attn.o_proj.bias" in unknown


def test_another_config_is_told_in_short(single: Path) -> None:
    """A config of another model gives a short answer: the first names and the number of the rest."""
    spec = spec_from_folder(single)
    (problem,) = weight_problems(single, replace(spec, intermediate_size=128))
    assert "mlp.gate_proj.weight is [96, 64] and must be [128, 64]" in str(problem)
    assert "and 9 more" in str(problem)
    (problem,) = weight_problems(single, replace(spec, num_hidden_layers=6))
    assert "lacks 18 of the 57 tensors" in str(problem)
    (problem,) = weight_problems(single, replace(spec, attention_bias=True))
    assert "lacks 12 of the 51 tensors" in str(problem)


def test_harmless_extra_tensors_are_passed_over(single: Path, tmp_path: Path) -> None:
    """Old rotary tables are no problem, and a stored head is none when it is tied; both are when they matter."""
    folder = copy(single, tmp_path / "model")
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    safetensors.torch.save_file(weights, path)
    spec = spec_from_folder(folder)
    assert weight_problems(folder, spec) == []
    assert weight_problems(folder, replace(spec, tie_word_embeddings=True)) == []
    weights["lm_head.bias"] = torch.zeros(384)
    safetensors.torch.save_file(weights, path)
    assert "lm_head.bias" in only_problem(folder, spec)


def test_index_reads_no_torch(sharded: Path) -> None:
    """The weights of a folder are checked in a process that never loads torch, numpy or safetensors."""
    code = (
        "import sys; from pathlib import Path; from triweave.model_spec import spec_from_folder; "
        "from triweave.weights_index import weight_problems; folder = Path(sys.argv[1]); "
        "assert weight_problems(folder, spec_from_folder(folder)) == []; "
        "raise SystemExit(str({'torch', 'numpy', 'safetensors'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(sharded)], capture_output=True, text=True)
    assert done.stderr.strip() == ""
