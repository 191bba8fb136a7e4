"""Layouts that nobody chose, drawn by seed from all that the rules allow, compute what transformers computes.

PARITY_DRAWS=300 pytest -n 2 tests/test_parity_drawn.py     # more of them
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from parity import make_reference, make_samples, verify_on_rank
from ranks import Ranks
from tiny_models import STYLES, tiny_llama

from triweave.layout import Layout, Offload, Recompute, Schedule, Shard, even_layers
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.rules import layout_problems

DRAWS = int(os.environ.get("PARITY_DRAWS", "6"))
MOST_RANKS = 8


class Drawn(NamedTuple):
    """A model, a layout and a batch."""

    model: dict[str, Any]
    layout: Layout
    per_rank: int
    """Micro-batches of a data-parallel rank."""
    seq: int
    packed: bool


def draw(rng: random.Random, folder: Path) -> Drawn:
    """The first draw that the rules allow; its model is written to `folder`."""
    while True:
        seq = rng.choice([8, 16, 24])
        model = draw_model(rng)
        spec = spec_from_folder(tiny_llama(folder, **model))
        for _ in range(200):
            layout, per_rank = draw_layout(rng, spec), rng.randint(1, 6)
            batch = per_rank * layout.dp * layout.micro_batch
            problems = layout_problems(
                spec, layout, world_size=layout.world_size, seq_len=seq, global_batch=batch, gpus_per_node=None
            )
            if not problems and layout.world_size <= MOST_RANKS:
                return Drawn(model, layout, per_rank, seq, packed=rng.random() < 0.4)


def draw_model(rng: random.Random) -> dict[str, Any]:
    """Any member of the family, with odd numbers of layers, words and heads."""
    heads, head_dim = rng.choice([2, 4, 6, 8]), rng.choice([4, 8, 16])
    kv_heads = rng.choice([one for one in range(1, heads + 1) if heads % one == 0])
    return {
        **STYLES[rng.choice(list(STYLES))],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * 8,
        "intermediate_size": rng.choice([24, 48, 96]),
        "num_hidden_layers": rng.randint(1, 7),
        "vocab_size": rng.choice([301, 305, 320, 384]),
    }


def draw_layout(rng: random.Random, spec: ModelSpec) -> Layout:
    """Any layout, legal or not, with its layers shared out evenly or at random."""
    schedule: Schedule = rng.choice(get_args(Schedule))
    pp = rng.choice([1, 2, 2, 3, 4])
    vpp = rng.choice([2, 3]) if schedule == "interleaved" else 1
    dp, cp = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 4])
    recompute: list[Recompute] = [one for one in get_args(Recompute) if rng.random() < 0.2]
    offload: list[Offload] = [one for one in get_args(Offload) if rng.random() < 0.15]
    divisors = [one for one in range(1, dp * cp + 1) if dp * cp % one == 0]
    stages, layers = pp * vpp, spec.num_hidden_layers
    chosen: tuple[int, ...] = even_layers(layers, stages) if stages <= layers else (1,) * stages
    if stages <= layers and rng.random() < 0.4:
        cuts = sorted(rng.sample(range(1, layers), stages - 1))
        chosen = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True))
    return Layout(
        tp=rng.choice([1, 2, 2, 3, 4, 8]),
        pp=pp,
        vpp=vpp,
        cp=cp,
        dp=dp,
        micro_batch=rng.choice([1, 1, 2, 3]),
        sequence_parallel=rng.random() < 0.8,
        keep_gathered=rng.random() < 0.2,
        schedule=schedule,
        shard=rng.choice(get_args(Shard)),
        shard_group=rng.choice(divisors) if rng.random() < 0.4 else None,
        recompute=tuple(recompute),
        offload=tuple(offload),
        layers=chosen,
    )


@pytest.mark.parametrize("seed", range(DRAWS))
def test_drawn_layouts_equal_one_process(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """Outputs, loss and every gradient agree; every rank tells the same loss."""
    drawn = draw(random.Random(seed), tmp_path / "model")  # noqa: S311 - a layout, no secret
    layout = drawn.layout
    samples = make_samples(drawn.per_rank * layout.dp, layout.micro_batch, drawn.seq, 300, packed=drawn.packed)
    reference = make_reference(tmp_path / "model", samples, tmp_path / "reference.safetensors")
    verdicts = ranks.run(layout.world_size, verify_on_rank, tmp_path / "model", layout, samples, reference)
    assert verdicts[0].first_difference is None, (drawn, verdicts[0].to_json(), verdicts[0].outputs)
    assert len({verdict.layout_loss for verdict in verdicts}) == 1, drawn
