"""What checkpoint.hugging_face_write leaves on the disk, against safetensors, huggingface_hub and transformers."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
import zlib
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import STYLES, tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from triweave.checkpoint import staged_folder
from triweave.checkpoint.hugging_face_read import WeightReader
from triweave.checkpoint.hugging_face_write import HuggingFaceWriter, plan_shards
from triweave.checkpoint.safetensors_file import SafetensorsFile
from triweave.errors import InputError, RunFailed
from triweave.model_spec import TensorSpec, spec_from_folder
from triweave.weights_index import INDEX_FILE, weight_problems

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer and a licence, as a person would fine-tune it."""
    folder = tiny_tokenizer(tiny_llama(tmp_path_factory.mktemp("source")))
    (folder / "LICENSE.txt").write_text("terms")
    return folder


def export(source: Path, to: Path, dtype: torch.dtype, max_shard_bytes: int = 10**9, *, replace: bool = False) -> Path:
    """Read every tensor and write it, in an order that is not the model's."""
    spec = spec_from_folder(source)
    tensors = sorted(spec.tensors(), key=lambda tensor: zlib.crc32(tensor.name.encode()))
    writer = HuggingFaceWriter(to, spec, source, dtype, max_shard_bytes=max_shard_bytes, replace=replace)
    with WeightReader(source, spec) as reader, writer:
        for tensor in tensors:
            writer.write(tensor.name, reader.read(tensor.name, dtype=dtype))
    return to


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000])
def test_round_trip_keeps_every_bit(dtype: str, max_shard_bytes: int, tmp_path: Path) -> None:
    """Read and written in the stored type, all bytes of all tensors are the same, in one file or in many."""
    source = tiny_llama(tmp_path / "source", dtype=dtype)
    exported = export(source, tmp_path / "out", DTYPES[dtype], max_shard_bytes)
    before, after = weights(source), weights(exported)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert weight.dtype == after[name].dtype
        assert torch.equal(weight.view(torch.uint8), after[name].view(torch.uint8))
    assert weight_problems(exported, spec_from_folder(source)) == []


@pytest.mark.parametrize("style", STYLES)
def test_transformers_loads_the_export(style: str, tmp_path: Path) -> None:
    """Of every style of model, transformers loads the exported folder and computes the same logits."""
    source = tiny_llama(tmp_path / "source", **STYLES[style])
    exported = export(source, tmp_path / "out", torch.float32, max_shard_bytes=50_000)
    tokens = torch.arange(48).view(2, 24) * 7 % 384
    with torch.no_grad():
        expected, found = (AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, exported))
    assert torch.equal(expected, found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_file_is_the_one_the_library_writes(dtype: str, source: Path, tmp_path: Path) -> None:
    """A single file is byte for byte what safetensors' own save_file makes of the same tensors."""
    exported = export(source, tmp_path / "out", DTYPES[dtype])
    tensors = {name: weight.to(DTYPES[dtype]) for name, weight in weights(source).items()}
    safetensors.torch.save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (exported / "model.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), max_shard_bytes=st.integers(40, 300))
def test_shards_are_those_of_huggingface_hub(sizes: list[int], max_shard_bytes: int) -> None:
    """Files, their names and their tensors are what huggingface_hub's own splitting gives; none is too large."""
    tensors = [TensorSpec(f"t{number}", (size, 2)) for number, size in enumerate(sizes)]
    shards = plan_shards(tensors, 4, max_shard_bytes)
    tensors_of_torch = {tensor.name: torch.empty(tensor.shape) for tensor in tensors}
    split = huggingface_hub.split_torch_state_dict_into_shards(
        tensors_of_torch, max_shard_size=max_shard_bytes, filename_pattern="model{suffix}.safetensors"
    )
    assert {shard.file: [tensor.name for tensor in shard.tensors] for shard in shards} == split.filename_to_tensors
    for shard in shards:
        size = sum(4 * tensor.numel for tensor in shard.tensors)
        assert size <= max_shard_bytes or len(shard.tensors) == 1


def test_index_is_the_one_transformers_writes(tmp_path: Path) -> None:
    """The index of a sharded export has the totals, the tensors and the form of transformers' index."""
    reference = tiny_llama(tmp_path / "reference", max_shard_size="60KB")
    exported = export(reference, tmp_path / "out", torch.float32, max_shard_bytes=60_000)
    found = json.loads((exported / INDEX_FILE).read_text())
    expected = json.loads((reference / INDEX_FILE).read_text())
    # transformers goes through the parameters in its modules' order, which is another one inside a layer.
    assert found["metadata"] == expected["metadata"]
    assert found["weight_map"].keys() == expected["weight_map"].keys()
    assert set(found["weight_map"].values()) == {path.name for path in exported.glob("*.safetensors")}
    assert (exported / INDEX_FILE).read_text() == json.dumps(found, indent=2, sort_keys=True) + "\n"


def test_export_carries_all_that_serving_needs(source: Path, tmp_path: Path) -> None:
    """Config, tokenizer, chat template, generation config and licence travel along; only the type is set anew."""
    exported = export(source, tmp_path / "out", torch.bfloat16)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, exported))
    assert after == before | {"dtype": "bfloat16"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE.txt"):
        assert (exported / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in exported.iterdir()) == sorted(path.name for path in source.iterdir())
    assert AutoModelForCausalLM.from_pretrained(exported).dtype == torch.bfloat16
    chat = [{"role": "user", "content": "hello world"}]
    text = AutoTokenizer.from_pretrained(exported).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("keys", "written"),
    [({"torch_dtype": "float32"}, {"torch_dtype"}), ({}, {"torch_dtype"}), ({"dtype": 1}, {"dtype"})],
)
def test_type_is_set_under_the_key_the_config_uses(
    keys: dict[str, str], written: set[str], source: Path, tmp_path: Path
) -> None:
    """Old configs say torch_dtype and new ones dtype; the export keeps to what it found."""
    copied = tmp_path / "source"
    shutil.copytree(source, copied)
    config = json.loads((copied / "config.json").read_text())
    del config["dtype"]
    (copied / "config.json").write_text(json.dumps(config | keys))
    exported = json.loads((export(copied, tmp_path / "out", torch.float16) / "config.json").read_text())
    assert {key for key, value in exported.items() if value == "float16"} == written


def test_tokenizer_may_come_from_another_folder(source: Path, tmp_path: Path) -> None:
    """A run with a tokenizer of its own exports that one, and the model's config all the same."""
    own = tiny_tokenizer(tmp_path / "own")
    (own / "chat_template.jinja").write_text("{{ messages }}")
    bare = tiny_llama(tmp_path / "bare")
    spec = spec_from_folder(bare)
    with HuggingFaceWriter(tmp_path / "out", spec, bare, torch.float32, tokenizer=own) as writer:
        for tensor in spec.tensors():
            writer.write(tensor.name, torch.zeros(tensor.shape))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"} <= names


def test_folder_that_holds_something_is_kept(source: Path, tmp_path: Path) -> None:
    """An export never overwrites what is there unless it is told to, and then replaces all of it."""
    taken = tmp_path / "out"
    taken.mkdir()
    export(source, taken, torch.float32)
    shutil.rmtree(taken)
    taken.mkdir()
    (taken / "old.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        export(source, taken, torch.float32)
    assert (taken / "old.txt").read_text() == "mine"
    export(source, taken, torch.float32, replace=True)
    assert not (taken / "old.txt").exists()
    assert weight_problems(taken, spec_from_folder(source)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        export(source, tmp_path / "file", torch.float32, replace=True)


def test_export_may_replace_its_own_source(tmp_path: Path) -> None:
    """A folder can be converted in place: it is read to the end before it is replaced."""
    folder = tiny_tokenizer(tiny_llama(tmp_path / "model"))
    before = weights(folder)
    export(folder, folder, torch.bfloat16, replace=True)
    after = weights(folder)
    assert all(torch.equal(weight.bfloat16(), after[name]) for name, weight in before.items())
    assert (folder / "tokenizer.json").is_file()


def test_export_that_fails_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """Neither an exception nor a tensor that never came leaves a folder, whole or in parts."""
    spec = spec_from_folder(source)

    def write_one(*, then: Exception | None = None) -> None:
        with HuggingFaceWriter(tmp_path / "out", spec, source, torch.float32) as writer:
            writer.write("model.norm.weight", torch.ones(64))
            if then is not None:
                raise then

    with pytest.raises(ZeroDivisionError):
        write_one(then=ZeroDivisionError())
    with pytest.raises(ValueError, match="38 tensors of the exported model were never written"):
        write_one()
    assert list(tmp_path.iterdir()) == []


def test_wrong_tensors_are_refused(source: Path, tmp_path: Path) -> None:
    """A tensor of another shape, of another name or for the second time is the caller's mistake and is told."""
    spec = spec_from_folder(source)
    with HuggingFaceWriter(tmp_path / "out", spec, source, torch.float32) as writer:
        with pytest.raises(ValueError, match=r"is \[63\] and was announced as \[64\]"):
            writer.write("model.norm.weight", torch.ones(63))
        with pytest.raises(ValueError, match="no tensor of the exported model"):
            writer.write("model.norm.bias", torch.ones(64))
        for tensor in spec.tensors():
            writer.write(tensor.name, torch.ones(tensor.shape))
        with pytest.raises(ValueError, match="written before"):
            writer.write("model.norm.weight", torch.zeros(64))
    assert torch.equal(weights(tmp_path / "out")["model.norm.weight"], torch.ones(64))


def test_memory_order_does_not_matter(tmp_path: Path) -> None:
    """A transposed matrix, a vector with gaps and one that asks for its gradient are stored by their values."""
    path = tmp_path / "a.safetensors"
    matrix, vector = torch.arange(12.0).view(3, 4).T, torch.arange(8.0)[::2]
    file = SafetensorsFile(path, [TensorSpec("m", (4, 3)), TensorSpec("v", (4,))], torch.float32)
    file.write("m", torch.nn.Parameter(matrix))
    file.write("v", vector)
    stored = safetensors.torch.load_file(path)
    assert torch.equal(stored["m"], matrix)
    assert torch.equal(stored["v"], vector)


def test_full_disk_is_told_before_and_during(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is told with both numbers before anything is written; a later refusal leaves nothing."""
    spec = spec_from_folder(source)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(InputError, match=f"has 1000 bytes free and the weights take {spec.num_parameters * 4}"):
            HuggingFaceWriter(tmp_path / "a" / "b" / "out", spec, source, torch.float32)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SafetensorsFile, "write", refuse)
    with (
        pytest.raises(RunFailed, match="No space left on device"),
        HuggingFaceWriter(tmp_path / "out", spec, source, torch.float32) as writer,
    ):
        writer.write("model.norm.weight", torch.ones(64))
    assert list(tmp_path.iterdir()) == []


def test_every_file_is_on_the_disk_before_the_rename(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files and their folder are flushed first, then comes the name, then the parent folder is flushed."""
    events: list[str] = []
    sync, rename = staged_folder.sync, Path.rename
    monkeypatch.setattr(staged_folder, "sync", lambda path: (events.append(path.name), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    exported = export(source, tmp_path / "out", torch.float32, max_shard_bytes=100_000)
    renamed = events.index("rename")
    assert set(events[: renamed - 1]) == {path.name for path in exported.iterdir()}
    assert events[renamed - 1].startswith(".out.partial")
    assert events[renamed + 1 :] == [tmp_path.name]


def test_writing_copies_nothing(tmp_path: Path) -> None:
    """A tensor goes from its own memory to its place in the file: 4 tensors of 16 MiB take no Python memory."""
    tensors = [TensorSpec(f"t{number:02d}", (4, 2**20)) for number in range(4)]
    file = SafetensorsFile(tmp_path / "a.safetensors", tensors, torch.float32)
    weight = torch.zeros(4, 2**20)
    tracemalloc.start()
    for tensor in tensors:
        file.write(tensor.name, weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert os.path.getsize(file.path) > 4 * 2**24
    assert not file.missing
