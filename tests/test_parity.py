"""Every axis and every combination computes what transformers computes in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from parity import engine_for, in_pieces, make_reference, make_samples, verify_on_rank
from ranks import Ranks
from tiny_models import STYLES, tiny_llama

from triweave.groups import alone
from triweave.layout import Layout
from triweave.transport.messages import Messages
from triweave.verify.reference import Reference, Sample

SEQ = 16


class Oracle:
    """What transformers gives for a model and a number of micro-batches; asked once, used by many layouts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, tuple[Path, list[Sample], Reference]] = {}

    def ask(
        self, model: dict[str, object], count: int, size: int, packed: bool
    ) -> tuple[Path, list[Sample], Reference]:
        """The model's folder, the micro-batches and the answer."""
        key = repr((sorted(model.items(), key=str), count, size, packed))
        if key not in self.known:
            place = self.folder / str(len(self.known))
            folder = tiny_llama(place / "model", **model)
            samples = make_samples(count, size, SEQ, 300, packed=packed)
            self.known[key] = (folder, samples, make_reference(folder, samples, place / "reference.safetensors"))
        return self.known[key]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """transformers, with a memory."""
    return Oracle(tmp_path_factory.mktemp("oracle"))


def check(
    ranks: Ranks,
    oracle: Oracle,
    layout: Layout,
    *,
    packed: bool = False,
    how: Callable[[], AbstractContextManager[None]] = nullcontext,
    **model: object,
) -> None:
    """Verify `layout` on a tiny model with these overrides."""
    # Without a pipeline a first micro-batch, a last one and one that is neither.
    per_rank = 4 if layout.pp > 1 else 3
    folder, samples, reference = oracle.ask(model, per_rank * layout.dp, layout.micro_batch, packed)
    verdicts = ranks.run(layout.world_size, verify_on_rank, folder, layout, samples, reference, how)
    assert verdicts[0].first_difference is None, (verdicts[0].to_json(), verdicts[0].outputs)
    assert len({verdict.layout_loss for verdict in verdicts}) == 1, "every rank reports the same global loss"
    assert len(verdicts[0].gradients) >= 5


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2),
    "tp2-nosp": Layout(tp=2, sequence_parallel=False),
    "tp4": Layout(tp=4),
    "tp8-more-than-kv-heads": Layout(tp=8),
    "tp8-nosp": Layout(tp=8, sequence_parallel=False),
    "pp2-gpipe": Layout(pp=2, schedule="gpipe"),
    "pp2": Layout(pp=2),
    "pp4": Layout(pp=4),
    "pp2-vpp2": Layout(pp=2, vpp=2, schedule="interleaved"),
    "pp2-zero-bubble": Layout(pp=2, schedule="zero-bubble"),
    "pp4-zero-bubble": Layout(pp=4, schedule="zero-bubble"),
    "dp2-none": Layout(dp=2, shard="none"),
    "dp2-optimizer": Layout(dp=2, shard="optimizer"),
    "dp2-gradients": Layout(dp=2, shard="gradients"),
    "dp2-full": Layout(dp=2, shard="full"),
    "dp3-full": Layout(dp=3, shard="full"),
    "tp2-pp2": Layout(tp=2, pp=2),
    "tp2-pp2-dp2": Layout(tp=2, pp=2, dp=2),
    "tp2-pp2-dp2-full-zero-bubble": Layout(tp=2, pp=2, dp=2, shard="full", schedule="zero-bubble"),
    "tp2-pp2-dp2-gradients-vpp": Layout(tp=2, pp=2, vpp=2, dp=2, shard="gradients", schedule="interleaved"),
    "tp2-nosp-pp2-vpp2": Layout(tp=2, pp=2, vpp=2, sequence_parallel=False, schedule="interleaved"),
    "dp4-optimizer-groups-of-2": Layout(dp=4, shard="optimizer", shard_group=2),
    "dp4-gradients-groups-of-2": Layout(dp=4, shard="gradients", shard_group=2),
    "dp4-full-groups-of-2": Layout(dp=4, shard="full", shard_group=2),
    "dp6-full-groups-of-3": Layout(dp=6, shard="full", shard_group=3),
    "dp2-optimizer-groups-of-1": Layout(dp=2, shard="optimizer", shard_group=1),
    "tp2-dp4-gradients-groups-of-2": Layout(tp=2, dp=4, shard="gradients", shard_group=2),
    "pp2-dp4-optimizer-groups-of-2-zero-bubble": Layout(pp=2, dp=4, shard_group=2, schedule="zero-bubble"),
    "pp2-dp4-full-groups-of-2-zero-bubble": Layout(pp=2, dp=4, shard="full", shard_group=2, schedule="zero-bubble"),
    "pp2-vpp2-dp4-gradients-groups-of-2": Layout(
        pp=2, vpp=2, dp=4, shard="gradients", shard_group=2, schedule="interleaved"
    ),
    "uneven": Layout(tp=2, pp=2, layers=(3, 1)),
    "recompute-layer": Layout(tp=2, pp=2, recompute=("layer",)),
    "recompute-parts": Layout(tp=2, pp=2, recompute=("norm", "swiglu", "attention")),
    "recompute-mlp-zero-bubble": Layout(tp=2, pp=2, recompute=("norm", "mlp"), schedule="zero-bubble"),
    "recompute-full": Layout(dp=2, shard="full", recompute=("layer",)),
    "keep-gathered": Layout(tp=4, keep_gathered=True),
    "keep-gathered-zero-bubble": Layout(tp=2, pp=2, schedule="zero-bubble", keep_gathered=True, recompute=("mlp",)),
    "micro-batch-2": Layout(tp=2, pp=2, micro_batch=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_equals_one_process(ranks: Ranks, oracle: Oracle, layout: Layout) -> None:
    """Outputs, loss and every gradient agree with transformers on this layout."""
    check(ranks, oracle, layout)


CONTEXT = {
    "cp2": Layout(cp=2),
    "cp4": Layout(cp=4),
    "cp2-micro-batch-2": Layout(cp=2, micro_batch=2),
    "cp2-tp2": Layout(cp=2, tp=2),
    "cp2-tp2-nosp": Layout(cp=2, tp=2, sequence_parallel=False),
    "cp2-tp4-more-than-kv-heads": Layout(cp=2, tp=4),
    "cp2-pp2": Layout(cp=2, pp=2),
    "cp2-pp2-vpp2": Layout(cp=2, pp=2, vpp=2, schedule="interleaved"),
    "cp2-pp2-zero-bubble": Layout(cp=2, pp=2, schedule="zero-bubble"),
    "cp4-tp2-keep-gathered": Layout(cp=4, tp=2, keep_gathered=True),
    "cp2-none": Layout(cp=2, shard="none"),
    "cp2-full": Layout(cp=2, shard="full"),
    "cp2-dp2-none": Layout(cp=2, dp=2, shard="none"),
    "cp2-dp2-optimizer": Layout(cp=2, dp=2),
    "cp2-dp2-gradients": Layout(cp=2, dp=2, shard="gradients"),
    "cp2-dp2-full": Layout(cp=2, dp=2, shard="full"),
    "cp2-tp2-pp2": Layout(cp=2, tp=2, pp=2, recompute=("norm", "swiglu", "attention")),
    "cp2-pp2-dp2-full-zero-bubble": Layout(cp=2, pp=2, dp=2, shard="full", schedule="zero-bubble"),
    "cp2-recompute-layer": Layout(cp=2, tp=2, recompute=("layer",)),
    "cp2-recompute-attention": Layout(cp=2, recompute=("attention",)),
    "cp2-recompute-mlp-zero-bubble": Layout(cp=2, pp=2, recompute=("norm", "mlp"), schedule="zero-bubble"),
}


@pytest.mark.parametrize("layout", CONTEXT.values(), ids=CONTEXT.keys())
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_context_parallel_equals_one_process(ranks: Ranks, oracle: Oracle, layout: Layout, packed: bool) -> None:
    """Ranks that hold two slices of each sequence compute what one process computes, also of packed documents."""
    check(ranks, oracle, layout, packed=packed)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4, micro_batch=2, recompute=("layer",)),
        Layout(tp=4, keep_gathered=True),
        Layout(tp=8),
        Layout(tp=2, pp=2, dp=2, shard="full", schedule="zero-bubble", recompute=("norm", "swiglu")),
    ],
    ids=["tp4", "tp4-keep-gathered", "tp8", "tp2-pp2-dp2-full-zero-bubble"],
)
def test_products_in_pieces_equal_one_process(ranks: Ranks, oracle: Oracle, layout: Layout) -> None:
    """A model whose products are done piece by piece, each while others travel, is the same model."""
    check(ranks, oracle, layout, how=in_pieces)


def transport_on_rank(rank: int, folder: Path) -> str:
    """What carries slices between products."""
    with in_pieces():
        return engine_for(folder, Layout(tp=2), SEQ, 1).tp.transport.name


def test_pieces_are_messages(ranks: Ranks, tmp_path: Path) -> None:
    """The tests of products in pieces have pieces: what they ask for is what the engine takes."""
    assert ranks.run(2, transport_on_rank, tiny_llama(tmp_path)) == [Messages(alone()).name] * 2


STYLE_LAYOUTS = {
    "tp2-pp2": Layout(tp=2, pp=2),
    "tp8-more-than-kv-heads": Layout(tp=8),
    "pp2-dp2-full": Layout(pp=2, dp=2, shard="full"),
}


@pytest.mark.parametrize("layout", STYLE_LAYOUTS.values(), ids=STYLE_LAYOUTS.keys())
@pytest.mark.parametrize("style", [style for style in STYLES if style != "llama2"])
def test_every_family_member_on_every_axis(ranks: Ranks, oracle: Oracle, layout: Layout, style: str) -> None:
    """Rope scaling, tied embeddings, another head size and QKV biases hold on a grid too."""
    check(ranks, oracle, layout, **STYLES[style])


TIED = {
    "one": Layout(),
    "dp2-full": Layout(dp=2, shard="full"),
    "pp2-dp2-none": Layout(pp=2, dp=2, shard="none"),
    "pp2-dp2-optimizer": Layout(pp=2, dp=2),
    "pp2-dp2-gradients-zero-bubble": Layout(pp=2, dp=2, shard="gradients", schedule="zero-bubble"),
    "pp4-vpp1": Layout(pp=4),
    "pp2-vpp2": Layout(pp=2, vpp=2, schedule="interleaved"),
}


@pytest.mark.parametrize("layout", TIED.values(), ids=TIED.keys())
def test_tied_embeddings_share_one_gradient(ranks: Ranks, oracle: Oracle, layout: Layout) -> None:
    """The tied weight's gradient is the sum of the lookup's and the head's, wherever the two live."""
    check(ranks, oracle, layout, tie_word_embeddings=True)


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=8, sequence_parallel=False)], ids=["tp4", "tp8-nosp"])
@pytest.mark.parametrize("vocab_size", [301, 305, 384])
def test_any_vocabulary_size(ranks: Ranks, oracle: Oracle, layout: Layout, vocab_size: int) -> None:
    """A vocabulary that TP does not divide is padded, and the padding takes no probability."""
    check(ranks, oracle, layout, vocab_size=vocab_size)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2, pp=2, micro_batch=2), Layout(tp=2, recompute=("layer",))],
    ids=["one", "tp2-pp2", "recompute"],
)
def test_packed_documents_do_not_see_each_other(ranks: Ranks, oracle: Oracle, layout: Layout) -> None:
    """Attention stays inside a document and positions start again, as transformers gives with a block mask."""
    check(ranks, oracle, layout, packed=True)
