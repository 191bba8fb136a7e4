"""`triweave convert`: every bit arrives, whatever the folder; what cannot be is refused and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import make_workspace, triweave
from on_disk import names
from safetensors.torch import load_file
from tiny_models import STYLES, tiny_llama, tiny_tokenizer
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoModelForCausalLM

from triweave.checkpoint.manifest import manifest_of
from triweave.checkpoint.places import locate
from triweave.checkpoint.store import MANIFEST_FILE
from triweave.conversion.convert import BAND_BYTES, Converted, Request, bands
from triweave.conversion.convert import convert as carry
from triweave.conversion.sizes import read_size
from triweave.errors import InputError
from triweave.model_spec import TensorSpec, spec_from_folder

QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ODD_VOCABULARY = 301


def convert(source: Path, target: Path, **options: Any) -> Converted:
    """Convert without telling anybody how far it is."""
    return carry(Request(source, target, **options), lambda name, done, total: None)


def weights(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor of a folder, read by the safetensors library."""
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    return {name: (t.dtype, tuple(t.shape), t.view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


def read_by_torch(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, read by torch's own loader."""
    contents: Metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - written by this test
    sizes = {name: entry.size for name, entry in contents.state_dict_metadata.items() if hasattr(entry, "size")}
    state = {name: torch.empty(size, dtype=dtype) for name, size in sizes.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose vocabulary no grid divides."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    return tiny_tokenizer(tiny_llama(folder, vocab_size=ODD_VOCABULARY, dtype="bfloat16"))


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    """The model as a checkpoint of triweave."""
    convert(model, tmp_path / "step-0")
    return tmp_path / "step-0"


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("through", ["step-0", "megatron"])
def test_there_and_back_keeps_every_bit(style: str, dtype: str, through: str, tmp_path: Path) -> None:
    """Tied and untied, with biases and without, in either type: what comes back is what transformers wrote."""
    source = tiny_llama(tmp_path / "hf", dtype=dtype, vocab_size=ODD_VOCABULARY, **STYLES[style])
    convert(source, tmp_path / through, to=None if through == "step-0" else "megatron")
    done = convert(tmp_path / through, tmp_path / "back", model=source, max_shard_bytes=100_000)
    assert weights(tmp_path / "back") == weights(source)
    assert (done.dtype, done.rounded) == (dtype, 0)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1


def test_transformers_computes_the_same(model: Path, tmp_path: Path) -> None:
    """After a way through both kinds of checkpoint, transformers loads the folder and gives equal logits."""
    convert(model, tmp_path / "step-0")
    convert(tmp_path / "step-0", tmp_path / "one", model=model)
    convert(tmp_path / "one", tmp_path / "megatron", to="megatron")
    convert(tmp_path / "megatron", tmp_path / "two")
    tokens = torch.arange(48).view(2, 24) * 7 % ODD_VOCABULARY
    with torch.no_grad():
        expected, found = (AutoModelForCausalLM.from_pretrained(f)(tokens).logits for f in (model, tmp_path / "two"))
    assert torch.equal(expected, found)
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_another_type_is_torchs_rounding(dtype: str, tmp_path: Path) -> None:
    """--dtype gives what torch's conversion gives, and rounded tensors are counted."""
    source = tiny_llama(tmp_path / "hf")
    done = convert(source, tmp_path / "out", to="hf", dtype=dtype)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert all(torch.equal(after[name], before[name].to(getattr(torch, dtype))) for name in before)
    assert done.rounded == (0 if dtype == "float32" else len(before))


def test_torch_reads_the_checkpoint(model: Path, checkpoint: Path) -> None:
    """torch's own loader finds the weights in float32 under Hugging Face names, and moments that are zero."""
    found, expected = read_by_torch(checkpoint, torch.float32), load_file(model / "model.safetensors")
    assert len(found) == 3 * len(expected)
    for name, weight in expected.items():
        assert torch.equal(found[f"weight.{name}"], weight.float())
        assert not found[f"exp_avg.{name}"].any()
        assert not found[f"exp_avg_sq.{name}"].any()


def test_megatron_finds_its_own_layout(tmp_path: Path) -> None:
    """torch's loader finds Megatron's fused and stacked tensors, cut by the definition of each written out here."""
    source = tiny_llama(tmp_path / "hf", **STYLES["qwen2"])
    convert(source, tmp_path / "megatron", to="megatron")
    found, hf = read_by_torch(tmp_path / "megatron" / "release", torch.float32), load_file(source / "model.safetensors")
    spec = spec_from_folder(source)
    for layer in range(spec.num_hidden_layers):
        of = {name.removeprefix(f"model.layers.{layer}."): t for name, t in hf.items()}
        for kind in ("weight", "bias"):
            grouped = [of[f"{name}.{kind}"].unflatten(0, (spec.num_key_value_heads, -1)) for name in QUERY_KEY_VALUE]
            fused = torch.cat(grouped, dim=1).flatten(0, 1)
            assert torch.equal(found[f"decoder.layers.self_attention.linear_qkv.{kind}"][layer], fused)
        gate_up = torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]])
        assert torch.equal(found["decoder.layers.mlp.linear_fc1.weight"][layer], gate_up)
        norm = of["post_attention_layernorm.weight"]
        assert torch.equal(found["decoder.layers.mlp.linear_fc1.layer_norm_weight"][layer], norm)
    assert torch.equal(found["embedding.word_embeddings.weight"], hf["model.embed_tokens.weight"])


def test_bands_are_the_tensor() -> None:
    """Rows of a band fit the bound, however long, and together they are every row once."""
    for shape in [(128256, 8192), (8192,), (3, 2**26), (1, 1)]:
        found = list(bands(TensorSpec("t", shape)))
        assert [row for start, stop in found for row in (start, stop)][1:-1:2] == [s for _, s in found[:-1]]
        assert (found[0][0], found[-1][1]) == (0, shape[0])
        row_bytes = 4 * TensorSpec("t", shape).numel // shape[0]
        assert all((stop - start) * row_bytes <= max(BAND_BYTES, row_bytes) for start, stop in found)


# --- a run's checkpoint -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run of uneven stages has ended."""
    folder = make_workspace(tmp_path_factory.mktemp("run") / "work")
    done = triweave("train", "run.yaml", "--layout.layers", "[1, 3]", "--train.steps", "3", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_runs_checkpoint_is_its_export(run: Path) -> None:
    """What `convert` makes of the last checkpoint of an uneven TP 2 x PP 2 run is what `train` exported itself."""
    done = triweave("convert", "out/checkpoints/step-3", "converted", "--json", cwd=run)
    assert done.returncode == 0, done.stderr
    assert weights(run / "converted") == weights(run / "out" / "hf")
    told = json.loads(done.stdout)
    assert told["source"]["kind"] == "triweave"
    assert told["dropped"] == ["78 tensors of AdamW's moments (exp_avg, exp_avg_sq)"]
    assert (run / "converted" / "tokenizer.json").is_file()


def test_a_run_resumes_what_was_converted(run: Path) -> None:
    """From a converted folder a run of another layout takes the very steps that it takes from the folder itself."""
    assert triweave("convert", "model", "start/step-0", cwd=run).returncode == 0
    losses = []
    for output, words in (("a", ()), ("b", ("--resume", "start/step-0"))):
        grid = ("--layout.tp", "1", "--layout.pp", "2", "--train.steps", "2", "--output_dir", output)
        done = triweave("train", "run.yaml", *grid, *words, cwd=run)
        assert done.returncode == 0, done.stderr
        lines = (run / output / "metrics.jsonl").read_text().splitlines()
        losses.append([(told["loss"], told["grad_norm"]) for told in map(json.loads, lines)])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "options", "says"),
    [
        ("hf", "hf", {"to": "hf"}, "DST = .*is SRC"),
        ("hf", "hf/inside", {"to": "hf"}, "one inside the other"),
        ("hf/model.safetensors", "out", {}, "is not a folder"),
        ("hff", "out", {}, "is not a folder; nearest: .*hf"),
        ("empty", "out", {}, "is none of a Hugging Face folder"),
        ("hf", "out", {}, "--to: is needed"),
        ("hf", "out", {"to": "megatrom"}, "--to = megatrom: must be hf, triweave, megatron; nearest: megatron"),
        ("hf", "taken", {"to": "hf"}, "is not empty; nearest: another folder, or --force"),
        ("hf", "taken", {"to": "hf", "force": True}, "so --force does not replace it"),
        ("step-0", "step-1", {}, "`train` reshards it"),
        ("bare", "out", {}, "--model: is needed"),
        ("hf", "step-1", {"dtype": "bfloat16"}, "must be float32: a checkpoint holds master weights"),
        ("hf", "out", {"to": "hf", "dtype": "bf16"}, "--dtype = bf16: must be bfloat16"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Path, checkpoint: Path, tmp_path: Path, source: str, target: str, options: dict[str, Any], says: str
) -> None:
    """Each wrong request is one message, and nothing is touched."""
    shutil.copytree(model, tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("years")
    shutil.copytree(checkpoint, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "hugging_face")
    before = names(tmp_path)
    with pytest.raises(InputError, match=says):
        convert(tmp_path / source, tmp_path / target, **options)
    assert names(tmp_path) == before
    assert weights(tmp_path / "hf") == weights(model)


def test_force_replaces_a_model(model: Path, tmp_path: Path) -> None:
    """--force takes a model that is there away, and nothing of it stays."""
    old = tiny_llama(tmp_path / "out", vocab_size=77)
    (old / "left.txt").write_text("over")
    convert(model, old, to="hf", force=True)
    assert weights(old) == weights(model)
    assert names(tmp_path) == ["out"]
    assert not (old / "left.txt").exists()


@pytest.mark.parametrize("target", ["out", "step-9", "megatron"])
def test_interrupted_leaves_nothing(model: Path, tmp_path: Path, target: str) -> None:
    """Ctrl-C in the middle leaves no folder, whole or in parts, and what was there before stays."""
    kind = {"out": "hf", "step-9": "triweave", "megatron": "megatron"}[target]
    convert(model, tmp_path / target, to=kind)
    before = {path: path.read_bytes() for path in (tmp_path / target).rglob("*") if path.is_file()}

    def interrupt(name: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry(Request(model, tmp_path / target, kind, force=True), interrupt)
    assert names(tmp_path) == [target]
    assert {path: path.read_bytes() for path in (tmp_path / target).rglob("*") if path.is_file()} == before


def test_float16_does_not_make_infinities(tmp_path: Path) -> None:
    """A weight that float16 cannot hold is refused by name and value."""
    source = tiny_llama(tmp_path / "hf", std=1e5)
    with pytest.raises(InputError, match=r"float16: ends at 65504, and model\.embed_tokens\.weight holds"):
        convert(source, tmp_path / "out", to="hf", dtype="float16")
    assert names(tmp_path) == ["hf"]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("4GiB", 2**32), ("1kb", 1000)])
def test_sizes(text: str, size: int) -> None:
    """Sizes are read with Hugging Face's units."""
    assert read_size(text, "--max-shard-size") == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "5 bytes", "0GB", "999B", "1e9B", "99999999GB"])
def test_sizes_that_are_none(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(InputError, match="--max-shard-size"):
        read_size(text, "--max-shard-size")


# --- damage -----------------------------------------------------------------------------------------------------------


def data_file(folder: Path) -> Path:
    """The file that holds the tensors."""
    (path,) = folder.glob("*.distcp")
    return path


def flip_a_weight(folder: Path) -> None:
    content = bytearray(data_file(folder).read_bytes())
    content[len(content) // 2] ^= 1
    data_file(folder).write_bytes(content)


def flip_and_agree(folder: Path) -> None:
    flip_a_weight(folder)
    agree(folder)


def cut(folder: Path) -> None:
    os.truncate(data_file(folder), data_file(folder).stat().st_size // 2)


def lead_outside(folder: Path) -> None:
    shutil.copy(data_file(folder), folder.parent / "other.distcp")
    rewrite(
        folder,
        lambda contents: [setattr(p, "relative_path", "../other.distcp") for p in contents.storage_data.values()],
    )


def point_past_the_end(folder: Path) -> None:
    rewrite(folder, lambda contents: [setattr(p, "offset", 2**40) for p in contents.storage_data.values()])


def claim_a_petabyte(folder: Path) -> None:
    def grow(contents: Metadata) -> None:
        entry: Any = contents.state_dict_metadata["weight.model.norm.weight"]
        entry.size = torch.Size([2**47])
        for chunk in entry.chunks:
            chunk.sizes = torch.Size([2**47])

    rewrite(folder, grow)


def take_for_another(folder: Path) -> None:
    """The table of contents says that a norm lies where a matrix does."""

    def change(contents: Metadata) -> None:
        index = {i.fqn: i for i in contents.storage_data}
        matrix = index["weight.model.layers.0.self_attn.q_proj.weight"]
        contents.storage_data[index["weight.model.norm.weight"]] = contents.storage_data[matrix]

    rewrite(folder, change)


def rewrite(folder: Path, change: Callable[[Metadata], object]) -> None:
    contents = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - written by this test
    change(contents)
    (folder / ".metadata").write_bytes(pickle.dumps(contents))
    agree(folder)


def agree(folder: Path) -> None:
    """A manifest that fits what is in the folder now: whoever can change a file can change that too."""
    store, name = locate(folder)
    (folder / MANIFEST_FILE).unlink()
    (folder / MANIFEST_FILE).write_bytes(manifest_of(store, name).to_bytes())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip_a_weight, r"step-0: is a damaged checkpoint \(__0_0\.distcp has changed since it was written"),
        (lambda folder: data_file(folder).unlink(), r"\(__0_0\.distcp is missing\)"),
        (lambda folder: (folder / "manifest.json").unlink(), r"\(manifest\.json cannot be read"),
        (flip_and_agree, r"__0_0\.distcp: holds weight\.model\..*is damaged \(its bytes do not match their checksum\)"),
        (cut, r"\(__0_0\.distcp has [\d,]+ bytes and was written with"),
        (lead_outside, "may only name files that lie beside it"),
        (point_past_the_end, "cut short"),
        (claim_a_petabyte, r"a part of \[140737488355328\] has only \d+ bytes"),
        (take_for_another, "where the table of contents says"),
    ],
)
def test_damage_is_named(
    checkpoint: Path, model: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """A damaged or hostile checkpoint is refused with the file and the tensor, and nothing is written."""
    damage(checkpoint)
    before = names(tmp_path)
    with pytest.raises(InputError, match=says):
        convert(checkpoint, tmp_path / "out", model=model)
    assert names(tmp_path) == before


def test_another_model_is_told(checkpoint: Path, tmp_path: Path) -> None:
    """A config.json of another model is refused with the first tensors that differ."""
    other = tiny_llama(tmp_path / "other", hidden_size=32)
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight is \[301, 64\] and must be \[384, 32\]"):
        convert(checkpoint, tmp_path / "out", model=other)
