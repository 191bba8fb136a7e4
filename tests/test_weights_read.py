"""What checkpoint.hugging_face_read gives of a folder's weights, against the safetensors library and transformers."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import STYLES, tiny_llama
from transformers import AutoModelForCausalLM

from triweave.checkpoint import hugging_face_read
from triweave.checkpoint.hugging_face_read import WeightReader
from triweave.errors import InputError
from triweave.model_spec import spec_from_folder

MIB = 2**20
MAPS = Path("/proc/self/maps")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in more files than a reader keeps open, and many tensors in each."""
    return tiny_llama(tmp_path_factory.mktemp("sharded"), max_shard_size="60KB")


@pytest.fixture(scope="module")
def whole(sharded: Path) -> dict[str, torch.Tensor]:
    """The same weights, as transformers loads them."""
    state = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    return {name: weight.clone() for name, weight in state.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that comparing is exact for every value."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("style", STYLES)
def test_every_tensor_is_the_one_transformers_loads(style: str, tmp_path: Path) -> None:
    """Of every style of model, all weights are bit for bit those of transformers, under the same names."""
    folder = tiny_llama(tmp_path / "model", **STYLES[style])
    spec = spec_from_folder(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    names = {tensor.name for tensor in spec.tensors()}
    with WeightReader(folder, spec) as reader:
        assert expected.keys() - names <= {"lm_head.weight"}
        for name in expected:
            assert torch.equal(bits(reader.read(name, dtype=torch.float32)), bits(expected[name]))


@given(data=st.data())
def test_slice_is_the_slice_of_the_whole(data: st.DataObject, sharded: Path, whole: dict[str, torch.Tensor]) -> None:
    """Any slice along any dimension is that slice of the tensor, in memory of its own."""
    name = data.draw(st.sampled_from(sorted(whole)))
    dim = data.draw(st.integers(0, whole[name].dim() - 1))
    length = whole[name].shape[dim]
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.none() | st.integers(start, length))
    with WeightReader(sharded, spec_from_folder(sharded)) as reader:
        part = reader.read(name, dim=dim, start=start, stop=stop, dtype=torch.float32)
        expected = whole[name].narrow(dim, start, (length if stop is None else stop) - start)
        assert torch.equal(part, expected)
        assert part.is_contiguous()
        part.fill_(7)
        assert torch.equal(reader.read(name, dim=dim, start=start, stop=stop, dtype=torch.float32), expected)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("asked", [torch.float32, torch.float16, torch.bfloat16])
def test_conversion_is_that_of_torch(stored: str, asked: torch.dtype, tmp_path: Path) -> None:
    """A type is widened exactly and narrowed as torch rounds; a kept type keeps every bit."""
    folder = tiny_llama(tmp_path / "model", num_hidden_layers=1, dtype=stored)
    spec = spec_from_folder(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    with WeightReader(folder, spec) as reader:
        for name, weight in weights.items():
            read = reader.read(name, dtype=asked)
            assert read.dtype == asked
            assert torch.equal(bits(read), bits(weight.to(asked)))


@pytest.mark.parametrize("stores_head", [False, True])
def test_tied_head_is_the_embedding(stores_head: bool, tmp_path: Path) -> None:
    """The head of a tied model is its embedding, whatever head the file may hold besides."""
    folder = tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    if stores_head:
        safetensors.torch.save_file(weights | {"lm_head.weight": torch.zeros(384, 64)}, path)
    with WeightReader(folder, spec_from_folder(folder)) as reader:
        head = reader.read("lm_head.weight", start=96, stop=192, dtype=torch.float32)
    assert torch.equal(head, weights["model.embed_tokens.weight"][96:192])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 65), (65, None)])
def test_slice_outside_the_tensor_is_refused(start: int, stop: int | None, sharded: Path) -> None:
    """A slice that leaves the tensor is an error: shortened in silence, it would give a rank a wrong shape."""
    reader = WeightReader(sharded, spec_from_folder(sharded))
    with pytest.raises(IndexError, match=r"model\.norm\.weight.* 64 "):
        reader.read("model.norm.weight", start=start, stop=stop, dtype=torch.float32)
    with pytest.raises(KeyError):
        reader.read("model.layers.9.mlp.up_proj.weight", dtype=torch.float32)


def test_another_models_weights_are_refused(sharded: Path, tmp_path: Path) -> None:
    """Weights that do not fit the config are refused when the reader is made, before a tensor is asked for."""
    other = tiny_llama(tmp_path / "other", intermediate_size=128)
    with pytest.raises(InputError, match="must be"):
        WeightReader(sharded, spec_from_folder(other))


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux lists what a process has mapped")
def test_open_files_are_bounded(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shards there are, only a few are mapped at a time, and none after the block."""
    spec = spec_from_folder(sharded)
    shards = len(list(sharded.glob("*.safetensors")))
    monkeypatch.setattr(hugging_face_read, "MAX_OPEN_FILES", 2)
    assert shards > 5

    def mapped() -> int:
        return len({line.split()[-1] for line in MAPS.read_text().splitlines() if str(sharded) in line})

    with WeightReader(sharded, spec) as reader:
        seen = []
        for tensor in spec.tensors():
            reader.read(tensor.name, dtype=torch.float32)
            seen.append(mapped())
        assert max(seen) == 2
    assert mapped() == 0


def test_slice_of_a_huge_file_reads_only_itself(tmp_path: Path) -> None:
    """Four rows and four columns of a 4 GiB tensor cost neither its memory nor a copy of the file."""
    folder = tiny_llama(tmp_path / "model", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    rows = 4 * 2**30 // (4 * 64)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows, "tie_word_embeddings": True}))
    spec = spec_from_folder(folder)
    header: dict[str, object] = {}
    end = 0
    for tensor in spec.tensors():
        begin, end = end, end + 4 * tensor.numel
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (begin, end)}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)  # a sparse file: it takes no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with WeightReader(folder, spec) as reader:
        part = reader.read("lm_head.weight", start=rows - 4, stop=rows, dtype=torch.bfloat16)
    assert part.shape == (4, 64)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * MIB / 1024
