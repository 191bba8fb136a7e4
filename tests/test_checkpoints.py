"""Checkpoints know no layout: what one grid saved, any other reads, and a run goes on as if it had never stopped."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import made_once
from dense import Held, State, assemble, differences, held_slices
from hypothesis import given
from hypothesis import strategies as st
from on_disk import flip
from ranks import Ranks
from safetensors.torch import load_file
from saving import Trained, engine_on, progress, save, train
from tiny_configs import tiny_config
from torch import Tensor

from triweave.checkpoint.metadata_file import CheckpointReader
from triweave.checkpoint.slices import rectangles
from triweave.errors import InputError
from triweave.layout import Layout
from triweave.model_spec import spec_from_folder
from triweave.parameters import Piece
from triweave.training.checkpoints import load_checkpoint
from triweave.training.engine import DTYPES, Engine
from triweave.training.export import export_hugging_face
from triweave.training.run_progress import PROGRESS_FILE, RunProgress, read_progress

MOMENTS = ("weight", "exp_avg", "exp_avg_sq")
# A vocabulary that two ranks pad, and fewer key/value heads than four ranks.
MODEL = {"vocab_size": 301, "num_key_value_heads": 2}
SAVED_ON = {
    "untied": (Layout(tp=2, pp=2, dp=2), MODEL),
    "tied": (Layout(tp=2, pp=2, dp=2), MODEL | {"tie_word_embeddings": True}),
    "uneven-full": (Layout(pp=2, dp=3, shard="full", layers=(3, 1)), MODEL | {"intermediate_size": 46}),
    "groups": (Layout(dp=6, shard="gradients", shard_group=2), MODEL),
    "vpp-replicas": (Layout(pp=2, vpp=2, dp=3, shard="none", schedule="interleaved"), MODEL),
    "context": (Layout(tp=2, cp=2, dp=2), MODEL),
}
"""What a checkpoint was saved on."""
STEPS = dict.fromkeys(SAVED_ON, 5) | {"untied": 20}
"""Steps after it; many on one grid that has every axis of a dense model."""


def save_on_rank(
    rank: int, folder: Path, layout: Layout, target: Path, steps: int
) -> tuple[list[Held], Trained, list[Held]]:
    """Three steps, a checkpoint, and more steps: the state at the checkpoint, what followed, the state at the end."""
    engine = engine_on(folder, layout)
    train(engine, 3)
    at_save = held_slices(engine)
    save(target, engine, 3)
    after = train(engine, steps)
    return at_save, after, held_slices(engine)


def load_on_rank(
    rank: int, folder: Path, layout: Layout, checkpoint: str, steps: int
) -> tuple[list[Held], RunProgress, Trained, list[Held]]:
    """The state after loading, some steps from there, and the state at their end."""
    engine = engine_on(folder, layout)
    train(engine, 1)  # what was there before must not matter
    found = load_checkpoint(checkpoint, engine)
    loaded = held_slices(engine)
    return loaded, found, train(engine, steps), held_slices(engine)


class Saved:
    """A checkpoint, and the run it was taken from, as `make_saved` has left them."""

    def __init__(self, key: str, where: Path) -> None:
        self.layout, _ = SAVED_ON[key]
        self.folder = where / "model"
        self.checkpoint = f"{where}/checkpoints/step-3"
        self.spec = spec_from_folder(self.folder)
        run = torch.load(where / "run.pt")
        self.state: State = run["state"]
        self.after: Trained = run["after"]
        self.end: State = run["end"]


def make_saved(ranks: Ranks, key: str, where: Path) -> None:
    """Train, save and train on; what is to be compared with it goes into a file."""
    layout, model = SAVED_ON[key]
    folder = tiny_config(where / "model", **model)
    answers = ranks.run(layout.world_size, save_on_rank, folder, layout, where / "checkpoints", STEPS[key])
    spec = spec_from_folder(folder)
    state, end = (assemble(spec, [answer[which] for answer in answers]) for which in (0, 2))
    torch.save({"state": state, "after": answers[0][1], "end": end}, where / "run.pt")


@pytest.fixture
def saved(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The checkpoint that the tests load: made once, whichever process runs them and in whatever order."""
    key: str = request.param
    return Saved(key, made_once(tmp_path_factory, f"saved-{key}", lambda where: make_saved(ranks, key, where)))


class TestLayouts:
    @pytest.mark.parametrize(
        ("saved", "layout"),
        [
            ("untied", Layout()),
            ("untied", Layout(tp=4)),
            ("untied", Layout(pp=4)),
            ("untied", Layout(dp=3, shard="full")),
            ("untied", Layout(pp=2, vpp=2, schedule="interleaved")),
            ("tied", Layout()),
            ("tied", Layout(pp=2, dp=3, shard="gradients")),
            ("uneven-full", Layout(dp=6)),
            ("uneven-full", Layout(tp=2, pp=2, layers=(1, 3))),
            ("vpp-replicas", Layout(pp=4, schedule="zero-bubble")),
            ("groups", Layout(dp=6, shard="full", shard_group=3)),
            ("groups", Layout(tp=2, dp=3)),
            ("untied", Layout(dp=6, shard_group=2)),
            ("untied", Layout(cp=2, shard="full")),
            ("context", Layout(pp=2, dp=2)),
        ],
        ids=[
            *("one", "tp4", "pp4", "dp3-full", "vpp2", "tied-one", "tied-pp2-dp3"),
            *("uneven-dp6", "uneven-tp2-pp2", "vpp-pp4"),
            *("groups-of-3", "groups-tp2-dp3", "into-groups"),
            *("cp2-full", "context-pp2-dp2"),
        ],
        indirect=["saved"],
    )
    def test_any_layout_reads_it(self, ranks: Ranks, saved: Saved, layout: Layout) -> None:
        """Weights and both moments arrive bit for bit on another grid, and training goes on with the same losses."""
        answers = ranks.run(layout.world_size, load_on_rank, saved.folder, layout, saved.checkpoint, 2)
        loaded = assemble(saved.spec, [held for held, _, _, _ in answers])
        assert differences(loaded, saved.state, *MOMENTS) == []
        for _, found, after, _ in answers:
            assert found == progress(3, updates=3)
            # Sums in another order: float32's rounding, grown by Adam over two steps.
            assert after == [pytest.approx(step, rel=1e-4) for step in saved.after[:2]]

    @pytest.mark.parametrize("saved", SAVED_ON, indirect=True)
    def test_same_layout_goes_on_bit_for_bit(self, ranks: Ranks, saved: Saved) -> None:
        """Resumed where it was saved, a run has the losses, norms, weights and moments of one that never stopped."""
        size = saved.layout.world_size
        assert len(saved.after) >= 5
        answers = ranks.run(size, load_on_rank, saved.folder, saved.layout, saved.checkpoint, len(saved.after))
        assert [after for _, _, after, _ in answers] == [saved.after] * size
        assert differences(assemble(saved.spec, [end for *_, end in answers]), saved.end, *MOMENTS) == []

    @pytest.mark.parametrize("saved", ["groups", "vpp-replicas"], indirect=True)
    def test_each_part_is_written_once(self, saved: Saved) -> None:
        """What several ranks hold is in one file, and all of them have a share of the writing."""
        contents = CheckpointReader(saved.checkpoint).read_metadata()
        written = Counter[str]()
        for place in contents.storage_data.values():
            written[place.relative_path] += place.length
        files = {path.name: path.stat().st_size for path in Path(saved.checkpoint).glob("*.distcp")}
        assert {name: written[name] for name in files} == files
        assert len(files) == saved.layout.world_size
        if saved.layout.uses_shard_groups:
            assert max(files.values()) < 2 * min(files.values())
        for table in contents.state_dict_metadata.values():
            assert sum(chunk.sizes.numel() for chunk in table.chunks) == table.size.numel()

    @pytest.mark.parametrize("saved", ["untied", "tied"], indirect=True)
    def test_torch_reads_it(self, saved: Saved) -> None:
        """torch's own loader, which knows nothing of triweave, finds whole tensors under Hugging Face names."""
        state = {f"{kind}.{t.name}": torch.empty(t.shape) for kind in MOMENTS for t in saved.spec.tensors()}
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.load(state, checkpoint_id=saved.checkpoint, no_dist=True)
        whole = {kind: {t.name: state[f"{kind}.{t.name}"] for t in saved.spec.tensors()} for kind in MOMENTS}
        assert differences(whole, saved.state, *MOMENTS) == []
        assert differences(whole, saved.end, "weight") != []


# --- rectangles -------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), dim=st.sampled_from([0, 1, None]), data=st.data())
def test_rectangles_tile_the_run(rows: int, columns: int, dim: int | None, data: st.DataObject) -> None:
    """At most three rectangles hold exactly the elements of a run of a slice, as views of its memory."""
    shape = (rows,) if dim is None else (rows, columns)
    size = shape[dim or 0]
    begin = data.draw(st.integers(0, size - 1))
    piece = Piece("weight", shape, dim or 0, begin, data.draw(st.integers(begin + 1, size)))
    numel = torch.Size(piece.local_shape).numel()
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))

    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    local = whole.narrow(piece.dim, piece.start, piece.stop - piece.start).reshape(-1)
    flat = local[start:stop].clone()
    parts = list(rectangles(piece, start, flat))
    assert len(parts) <= 3
    written = torch.zeros(shape)
    for part in parts:
        window = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
        assert part.values.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert not written[window].any()
        written[window] = part.values
    expected = torch.zeros(numel)
    expected[start:stop] = flat
    assert torch.equal(written.narrow(piece.dim, piece.start, piece.stop - piece.start).reshape(-1), expected)
    assert torch.equal(written.count_nonzero(), torch.tensor(stop - start))


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A one-process engine that is only saved and loaded."""
    return engine_on(tiny_config(tmp_path_factory.mktemp("small")), Layout())


class TestRefused:
    @pytest.mark.parametrize(
        "content", [None, "{", "[]", '{"step": 3}', '{"step": 3, "other": 1}', "\udcff", "[" * 9999]
    )
    def test_no_progress(self, content: str | None, tmp_path: Path) -> None:
        """A folder whose progress file is missing, damaged or another one is no checkpoint."""
        if content is not None:
            (tmp_path / PROGRESS_FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(InputError, match="is no checkpoint"):
            read_progress(tmp_path)

    @pytest.mark.parametrize(
        ("model", "says"),
        [
            ({"hidden_size": 64}, r"weight.model.embed_tokens.weight is \[300, 32\] there and \[300, 64\] here"),
            ({"num_hidden_layers": 5}, r"layers.4.self_attn.q_proj.weight is missing there and \[32, 32\] here"),
            ({"num_hidden_layers": 3}, r"layers.3.self_attn.q_proj.weight is \[32, 32\] there and missing here"),
            ({"tie_word_embeddings": True}, r"weight.lm_head.weight is \[300, 32\] there and missing here"),
        ],
    )
    def test_another_model(self, small: Engine, tmp_path: Path, model: dict[str, Any], says: str) -> None:
        """The checkpoint of another model is refused with the first tensor that differs, also when it is larger."""
        checkpoint = save(tmp_path / "checkpoints", small, 1)
        layers = (int(model.get("num_hidden_layers", 4)),)
        other = engine_on(tiny_config(tmp_path / "other", **model), Layout(layers=layers))
        with pytest.raises(InputError, match=says):
            load_checkpoint(checkpoint, other)

    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (lambda folder: os.truncate(next(folder.glob("*.distcp")), 3000), "shorter than it was"),
            (lambda folder: next(folder.glob("*.distcp")).unlink(), "is missing"),
            (lambda folder: flip(next(folder.glob("*.distcp"))), "is a damaged checkpoint .*checksum"),
            (lambda folder: os.truncate(folder / ".metadata", 500), "is no table of contents"),
            (lambda folder: (folder / ".metadata").unlink(), "is no table of contents"),
            (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})), "is no table of contents"),
            (lambda folder: (folder / "random.json").write_text("[{}]"), "no states of random generators"),
        ],
        ids=["cut", "gone", "flipped", "contents-cut", "contents-gone", "other-contents", "random"],
    )
    def test_damaged(self, small: Engine, tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
        """A checkpoint that lost a part is refused with its path, even where nobody has looked at its hashes."""
        checkpoint = save(tmp_path, small, 1)
        damage(Path(checkpoint))
        with pytest.raises(InputError, match=says) as refused:
            load_checkpoint(checkpoint, small)
        assert checkpoint in str(refused.value)

    def test_code_in_a_checkpoint_never_runs(self, small: Engine, tmp_path: Path) -> None:
        """A table of contents that names a function is refused, and the function is not called."""
        contents = Path(save(tmp_path, small, 1)) / ".metadata"
        bait = tmp_path / "ran"

        class Bait:
            def __reduce__(self) -> tuple[Any, ...]:
                return (os.mkdir, (str(bait),))

        contents.write_bytes(pickle.dumps(Bait()))
        with pytest.raises(InputError, match=r"it names posix\.mkdir"):
            load_checkpoint(contents.parent, small)
        assert not bait.exists()
        pickle.loads(contents.read_bytes())  # noqa: S301 - the bait itself works
        assert bait.exists()


# --- export -----------------------------------------------------------------------------------------------------------


def export_on_rank(rank: int, source: Path, layout: Layout, target: Path, dtype: str) -> None:
    """Load a folder's weights and write them again."""
    engine = engine_on(source, layout, weights="load", dtype=dtype)
    export_hugging_face(engine, target, source, DTYPES[dtype])


def as_bytes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Type, shape and content."""
    return {
        name: (t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


EXPORTS = {
    "tp2-pp2-dp2": (Layout(tp=2, pp=2, dp=2), "float32", {}),
    "padded-vocabulary": (Layout(tp=4), "bfloat16", {"vocab_size": 301}),
    "tp8-more-than-kv-heads": (Layout(tp=8), "bfloat16", {}),
    "tied-pp4": (Layout(pp=4), "float32", {"tie_word_embeddings": True, "vocab_size": 301}),
    "biased-dp3-full": (Layout(dp=3, shard="full"), "bfloat16", {"model_type": "qwen2"}),
    "vpp-full": (Layout(pp=2, vpp=2, dp=3, shard="full", schedule="interleaved"), "float32", {}),
}


@pytest.mark.parametrize(("layout", "dtype", "model"), EXPORTS.values(), ids=EXPORTS.keys())
def test_export_is_the_source(ranks: Ranks, tmp_path: Path, layout: Layout, dtype: str, model: dict[str, Any]) -> None:
    """Loaded on any grid and exported untrained, every tensor that transformers wrote comes back byte for byte."""
    from tiny_models import tiny_llama

    source = tiny_llama(tmp_path / "source", dtype=dtype, hidden_size=32, intermediate_size=48, **model)
    ranks.run(layout.world_size, export_on_rank, source, layout, tmp_path / "hf", dtype)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", source))
    assert as_bytes(ours) == as_bytes(theirs)


def export_trained(rank: int, folder: Path, layout: Layout, checkpoint: str, target: Path) -> list[Held]:
    """Export what a checkpoint holds, trained one step further."""
    engine = engine_on(folder, layout)
    load_checkpoint(checkpoint, engine)
    train(engine, 1)
    export_hugging_face(engine, target, folder, torch.float32)
    return held_slices(engine)


@pytest.mark.parametrize("saved", ["tied"], indirect=True)
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, dp=2), Layout(dp=2, shard="full")], ids=["tp2-pp2-dp2", "full"])
def test_export_is_the_trained_model(ranks: Ranks, saved: Saved, tmp_path: Path, layout: Layout) -> None:
    """What is exported after training is what the ranks' master weights hold, tensor by tensor."""
    answers = ranks.run(layout.world_size, export_trained, saved.folder, layout, saved.checkpoint, tmp_path / "hf")
    state: State = assemble(saved.spec, answers)
    exported: State = {"weight": load_file(tmp_path / "hf" / "model.safetensors")}
    assert exported["weight"].keys() == state["weight"].keys()
    assert differences(exported, state, "weight") == []
    assert differences(exported, saved.state, "weight") != []
