"""The arithmetic of training: learning rate, AdamW, clipping, the loss of a batch, first weights."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from dense import Held, State, assemble, differences, held_slices
from hypothesis import given
from hypothesis import strategies as st
from parity import engine_for, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config
from torch import Tensor
from torch.nn.functional import cross_entropy

from triweave.config.schema import OptimizerConfig
from triweave.layers.cross_entropy import IGNORE
from triweave.layout import Layout, even_layers
from triweave.llama import StageInput
from triweave.model_spec import spec_from_folder
from triweave.training.engine import Engine
from triweave.training.learning_rate import learning_rate, warmup_steps
from triweave.training.step import evaluate_step, train_step
from triweave.verify.reference import Sample, load_transformers

SEQ = 8
SAMPLES = make_samples(12, 1, SEQ, 300, packed=False)
LR_SCHEDULES = get_args(get_type_hints(OptimizerConfig)["lr_schedule"])


def engine_on(folder: Path, layout: Layout, samples: Sequence[Sample], **model: object) -> Engine:
    """An engine for four layers and these micro-batches."""
    layout = replace(layout, layers=even_layers(4, layout.num_stages))
    return engine_for(folder, layout, SEQ, len(samples) // layout.dp, **({"weights": "random"} | model))


# --- learning rate ----------------------------------------------------------------------------------------------------

CONFIGS = st.builds(
    OptimizerConfig,
    learning_rate=st.floats(1e-6, 1.0),
    min_learning_rate=st.floats(0.0, 1e-6),
    lr_schedule=st.sampled_from(LR_SCHEDULES),
    warmup_steps=st.integers(0, 30),
)


class TestLearningRate:
    @given(config=CONFIGS, num_steps=st.integers(1, 200))
    def test_shape(self, config: OptimizerConfig, num_steps: int) -> None:
        """It rises evenly to the peak, reached on warm-up's last step, then never rises and ends where it should."""
        rates = [learning_rate(config, step, num_steps) for step in range(num_steps)]
        warmup = min(warmup_steps(config, num_steps), num_steps)
        for step in range(warmup):
            assert rates[step] == pytest.approx(config.learning_rate * (step + 1) / warmup_steps(config, num_steps))
        if 0 < warmup_steps(config, num_steps) <= num_steps:
            assert rates[warmup - 1] == pytest.approx(config.learning_rate, rel=1e-15)
        if warmup < num_steps:
            assert rates[warmup] == pytest.approx(config.learning_rate)
        falling = rates[warmup:]
        assert all(later <= earlier for earlier, later in pairwise(falling))
        assert all(0 < rate <= config.learning_rate * (1 + 1e-12) for rate in rates)
        if warmup_steps(config, num_steps) < num_steps:
            end = config.learning_rate if config.lr_schedule == "constant" else config.min_learning_rate
            assert learning_rate(config, num_steps, num_steps) == pytest.approx(end, abs=1e-18)

    @pytest.mark.parametrize("shape", ["linear", "cosine"])
    def test_decay_is_transformers_own(self, shape: str) -> None:
        """After warm-up, the factors are those of transformers' scheduler of that name."""
        from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

        make = get_linear_schedule_with_warmup if shape == "linear" else get_cosine_schedule_with_warmup
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        theirs = make(optimizer, num_warmup_steps=7, num_training_steps=50)
        config = OptimizerConfig(0.5, lr_schedule=shape, warmup_steps=7)  # type: ignore[arg-type]
        for step in range(50):
            if step >= 7:
                assert learning_rate(config, step, 50) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
            optimizer.step()
            theirs.step()

    @pytest.mark.parametrize(
        ("steps", "ratio", "num_steps", "warmup"),
        [(None, None, 100, 0), (5, None, 100, 5), (None, 0.03, 100, 3), (None, 0.03, 101, 4), (None, 1.0, 10, 10)],
    )
    def test_warm_up_is_a_number_or_a_share(
        self, steps: int | None, ratio: float | None, num_steps: int, warmup: int
    ) -> None:
        """Warm-up is given in steps, or as a share of the run that is rounded up."""
        assert warmup_steps(OptimizerConfig(warmup_steps=steps, warmup_ratio=ratio), num_steps) == warmup


# --- AdamW and clipping -----------------------------------------------------------------------------------------------


def gradient_of(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """A gradient that every rank can make."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(shape, generator=generator)


def optimize_on_rank(rank: int, folder: Path, layout: Layout) -> tuple[list[Held], list[Held]]:
    """First weights, and the state after five optimizer steps with given gradients."""
    engine = engine_on(folder, layout, SAMPLES)
    first = held_slices(engine)
    for step in range(5):
        for unit in engine.sharding.units:
            for segment in unit.segments():
                inside, piece = unit.in_shard(segment.start, segment.stop), segment.piece
                if inside is not None:
                    whole = gradient_of(piece.name, piece.shape, step)
                    flat = whole.narrow(piece.dim, piece.start, piece.stop - piece.start).reshape(-1)
                    start = unit.shard_start + inside.start - segment.start
                    unit.gradient[inside] = flat[start : start + inside.stop - inside.start]
        engine.optimizer.step(1e-2 / (step + 1))
        engine.sharding.publish()
    return first, held_slices(engine)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, dp=2),
        Layout(tp=2, dp=3, shard="full"),
        Layout(pp=2, dp=2, shard="none"),
        Layout(cp=2, dp=2),
    ],
    ids=["tp2-dp2", "tp2-dp3-full", "pp2-dp2-none", "cp2-dp2"],
)
def test_adamw_is_torchs_on_the_whole_model(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """Five steps on shards give the weights and moments of torch's AdamW on whole tensors, matrices alone decayed."""
    folder = tiny_config(tmp_path, vocab_size=301, architectures=["Qwen2ForCausalLM"])
    spec = spec_from_folder(folder)
    answers = ranks.run(layout.world_size, optimize_on_rank, folder, layout)
    first, last = (assemble(spec, [answer[moment] for answer in answers]) for moment in (0, 1))
    whole = {name: torch.nn.Parameter(value) for name, value in first["weight"].items()}
    config = OptimizerConfig()
    groups = [
        {"params": [p for p in whole.values() if p.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in whole.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.eps)
    for step in range(5):
        for group in adamw.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for name, parameter in whole.items():
            parameter.grad = gradient_of(name, tuple(parameter.shape), step)
        adamw.step()
    for name, parameter in whole.items():
        state = adamw.state[parameter]
        expected = {"weight": parameter.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        for kind, value in expected.items():
            # The fused kernel rounds in another order.
            torch.testing.assert_close(last[kind][name], value, rtol=1e-5, atol=1e-6, msg=f"{kind} of {name}")


def test_an_engine_is_freed_with_its_last_user(tmp_path: Path) -> None:
    """No cycle keeps masters and modules of an engine that has trained: the next one has its memory."""
    gc.disable()
    try:
        engine = engine_on(tiny_config(tmp_path), Layout(), SAMPLES)
        train_step(engine, local_batch(SAMPLES, engine.layout, 0), 1e-2, 1.0)
        held = [weakref.ref(engine.sharding.units[0].master), weakref.ref(engine.stages[0])]
        del engine
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3, 1e3])
def test_clipping_only_makes_smaller(tmp_path: Path, max_grad_norm: float) -> None:
    """Gradients longer than the limit are scaled to it, shorter ones and those without a limit are left as they are."""
    engine = engine_on(tiny_config(tmp_path), Layout(), SAMPLES)
    _, norm = train_step(engine, local_batch(SAMPLES, engine.layout, 0), 1e-2, max_grad_norm)
    assert 0.5 < norm < 1e2
    after = torch.cat([unit.gradient for unit in engine.sharding.units]).norm().item()
    # As in torch, 1e-6 is added to the norm before dividing.
    assert after == pytest.approx(min(norm, max_grad_norm or math.inf), rel=1e-5)


def train_on_rank(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], max_grad_norm: float, weights: str
) -> tuple[list[tuple[float, float]], list[Held]]:
    """Five steps; losses, gradient norms and the state at the end."""
    engine = engine_on(folder, layout, samples, weights=weights)
    batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
    steps = [train_step(engine, batch, 1e-2, max_grad_norm) for _ in range(5)]
    return steps, held_slices(engine)


def train_transformers(folder: Path, samples: list[Sample], max_grad_norm: float) -> list[tuple[float, float]]:
    """The same five steps by transformers' model, torch's AdamW and torch's clipping, in one process."""
    model, config = load_transformers(folder, torch.float32), OptimizerConfig()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=config.eps)
    tokens = torch.cat([sample.inputs.tokens for sample in samples], dim=1).t()
    targets = torch.cat([sample.targets for sample in samples], dim=1).t()
    steps = []
    for _ in range(5):
        loss = cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
        adamw.step()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.parametrize(
    ("layout", "max_grad_norm"),
    [(Layout(tp=2, dp=2), 0.05), (Layout(pp=2, dp=3, shard="full"), 0.0)],
    ids=["tp2-dp2-clipped", "pp2-dp3-full"],
)
def test_five_steps_equal_transformers(ranks: Ranks, tmp_path: Path, layout: Layout, max_grad_norm: float) -> None:
    """Losses and gradient norms over five steps, clipped hard or not at all, are those of transformers and torch."""
    from tiny_models import tiny_llama

    folder = tiny_llama(tmp_path / "model", hidden_size=32, intermediate_size=48)
    expected = train_transformers(folder, SAMPLES, max_grad_norm)
    assert all(norm > 10 * max_grad_norm for _, norm in expected), "clipping must bite"
    answers = ranks.run(layout.world_size, train_on_rank, folder, layout, SAMPLES, max_grad_norm, "load")
    for steps, _ in answers:
        # Sums in another order, grown by five steps of Adam.
        assert steps == [pytest.approx(step, rel=2e-4) for step in expected]


# --- the loss of a batch ----------------------------------------------------------------------------------------------


def merged(samples: list[Sample], size: int) -> list[Sample]:
    """The same sequences in micro-batches of `size`."""
    return [
        Sample(
            StageInput(
                torch.cat([sample.inputs.tokens for sample in samples[i : i + size]], dim=1),
                torch.cat([sample.inputs.positions for sample in samples[i : i + size]], dim=1),
            ),
            torch.cat([sample.targets for sample in samples[i : i + size]], dim=1),
        )
        for i in range(0, len(samples), size)
    ]


def evaluate_and_train(rank: int, folder: Path, layout: Layout, samples: list[Sample]) -> tuple[float, float, float]:
    """Mean loss of an evaluation, then loss and gradient norm of a training step."""
    engine = engine_on(folder, layout, samples)
    batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
    return (evaluate_step(engine, batch) / batch.trained_tokens, *train_step(engine, batch, 1e-2, 1.0))


SPLITS = {
    "micro-batch-3": Layout(micro_batch=3),
    "micro-batch-12": Layout(micro_batch=12),
    "dp2-micro-batch-3": Layout(dp=2, micro_batch=3),
    "dp3-full": Layout(dp=3, shard="full"),
    "dp4-micro-batch-3": Layout(dp=4, micro_batch=3, shard="none"),
    "tp2-pp2-micro-batch-2": Layout(tp=2, pp=2, micro_batch=2),
    "cp2-dp2-full": Layout(cp=2, dp=2, shard="full"),
}


@pytest.mark.parametrize("layout", SPLITS.values(), ids=SPLITS.keys())
def test_loss_does_not_depend_on_the_split(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """However a global batch is cut, its loss is the mean over its trained tokens, and so is its gradient."""
    folder = tiny_config(tmp_path)
    whole = evaluate_and_train(0, folder, Layout(), SAMPLES)
    assert whole[0] == pytest.approx(whole[1], rel=1e-6)
    cut = merged(SAMPLES, layout.micro_batch)
    for answer in ranks.run(layout.world_size, evaluate_and_train, folder, layout, cut):
        assert answer == pytest.approx(whole, rel=1e-5)


def test_mean_of_means_would_differ(tmp_path: Path) -> None:
    """The micro-batches above have so unequal numbers of trained tokens that averaging their means shows at once."""
    engine = engine_on(tiny_config(tmp_path), Layout(), SAMPLES[:1])
    batches = [local_batch([sample], engine.layout, 0) for sample in SAMPLES]
    sums = [evaluate_step(engine, batch) for batch in batches]
    tokens = [batch.trained_tokens for batch in batches]
    assert min(tokens) > 0
    mean_of_means = sum(loss / count for loss, count in zip(sums, tokens, strict=True)) / len(sums)
    assert abs(mean_of_means / (sum(sums) / sum(tokens)) - 1) > 1e-3


def test_batch_without_trained_tokens_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """A data-parallel rank whose sequences train nothing adds nothing, and breaks nothing."""
    empty = [Sample(sample.inputs, torch.full_like(sample.targets, IGNORE)) for sample in SAMPLES[:2]]
    folder = tiny_config(tmp_path)
    expected = evaluate_and_train(0, folder, Layout(), SAMPLES[:2])
    for answer in ranks.run(2, evaluate_and_train, folder, Layout(dp=2), [*SAMPLES[:2], *empty]):
        assert answer == pytest.approx(expected, rel=1e-5)


# --- first weights ----------------------------------------------------------------------------------------------------


def draw_on_rank(rank: int, folder: Path, layout: Layout, model: dict[str, Any]) -> list[Held]:
    """The first weights of a rank."""
    return held_slices(engine_on(folder, layout, SAMPLES, **model))


def drawn(folder: Path, **model: object) -> State:
    """The first weights in one process."""
    return assemble(spec_from_folder(folder), [draw_on_rank(0, folder, Layout(), model)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=4), Layout(pp=2, dp=2, shard="full"), Layout(tp=2, pp=2, vpp=2, schedule="interleaved")],
    ids=["tp4", "pp2-dp2-full", "tp2-pp2-vpp2"],
)
def test_first_weights_are_the_same_everywhere(ranks: Ranks, tmp_path: Path, layout: Layout, dtype: str) -> None:
    """Random weights follow the seed and the name: every layout starts from the same model, bit for bit."""
    folder = tiny_config(tmp_path, vocab_size=301, tie_word_embeddings=True, num_key_value_heads=2)
    answers = ranks.run(layout.world_size, draw_on_rank, folder, layout, {"dtype": dtype})
    assert differences(assemble(spec_from_folder(folder), answers), drawn(folder, dtype=dtype), "weight") == []


def test_first_weights_are_those_of_a_new_llama(tmp_path: Path) -> None:
    """Matrices are normal with the config's deviation and all different, norms are one, biases zero."""
    folder = tiny_config(tmp_path / "a", hidden_size=64, initializer_range=0.02, architectures=["Qwen2ForCausalLM"])
    weights = drawn(folder)["weight"]
    matrices = {name: value for name, value in weights.items() if value.dim() == 2}
    for name, value in weights.items():
        if name.endswith("norm.weight"):
            assert value.eq(1).all()
        elif name.endswith(".bias"):
            assert value.eq(0).all()
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(value.mean().item()) < 0.002
    assert len({value.sum().item() for value in matrices.values()}) == len(matrices)
    # Another model with the same sizes under the same names starts alike; there is no stream that all draw from.
    llama = drawn(tiny_config(tmp_path / "b", hidden_size=64, initializer_range=0.02))["weight"]
    assert all(torch.equal(value, weights[name]) for name, value in llama.items())
