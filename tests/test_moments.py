"""AdamW's moments in bfloat16: what a step makes of them, what betas they follow, and where they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from dense import Held, assemble, differences, held_slices
from parity import engine_for
from ranks import Ranks
from saving import Trained, engine_on, save, train
from test_dryrun import SPEC, resolved
from tiny_configs import tiny_config
from torch import Tensor

from triweave.checkpoint.metadata_file import CheckpointReader
from triweave.config.schema import OptimizerConfig
from triweave.dryrun.memory import rank_memory
from triweave.layout import Layout
from triweave.llama import StageInput
from triweave.model_spec import spec_from_folder
from triweave.moments import LEAST_SHARES, MomentsDtype
from triweave.planner.assumptions import OURS
from triweave.planner.memory import predict_memory
from triweave.training import optimizer
from triweave.training.checkpoints import load_checkpoint, retyped_moments, snapshot_bytes
from triweave.training.engine import Engine
from triweave.training.step import Batch, train_step

SMALL = ("exp_avg", "exp_avg_sq")
LIMIT = 1 - LEAST_SHARES["bfloat16"]


def give_gradients(engine: Engine, scale: float, generator: torch.Generator) -> None:
    """Normal numbers in place of reduced gradients."""
    for unit in engine.sharding.units:
        unit.gradient.normal_(0, scale, generator=generator)


def states(engine: Engine) -> Iterator[dict[str, Tensor]]:
    """Masters and moments of every part."""
    for part, state in engine.optimizer.states():
        yield {"master": part.parameter.data, "gradient": part.unit.gradient[part.inside], **state}


@pytest.fixture
def small(tmp_path: Path) -> Engine:
    """One process, moments in bfloat16."""
    return engine_on(tiny_config(tmp_path), Layout(), moments="bfloat16")


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divisor", [None, 3.7])
def test_a_step_is_torchs_rounded_once(small: Engine, divisor: float | None) -> None:
    """Masters follow float64's AdamW from the same bfloat16 moments; the new moments are its own, rounded once."""
    generator, config = torch.Generator().manual_seed(0), small.optimizer.config
    by = None if divisor is None else torch.tensor(divisor)
    for step in range(1, 5):
        give_gradients(small, 10.0**-step, generator)
        before = [{name: value.double() for name, value in state.items()} for state in states(small)]
        small.optimizer.step(1e-2, by)
        for (part, _), old, new in zip(small.optimizer.states(), before, states(small), strict=True):
            theirs = torch.nn.Parameter(old["master"])
            decay = config.weight_decay if optimizer._is_decayed(part) else 0.0
            exact = torch.optim.AdamW([theirs], 1e-2, config.betas, config.eps, decay)
            exact.state[theirs] = {name: old[name] for name in (*SMALL, "step")}
            theirs.grad = old["gradient"] / (divisor or 1.0)
            exact.step()
            torch.testing.assert_close(new["master"].double(), theirs.detach(), rtol=2e-6, atol=2e-7)
            for name in SMALL:
                assert new[name].dtype is torch.bfloat16
                # Half of the last of 8 bits, and what float32 loses on the way.
                torch.testing.assert_close(new[name].double(), exact.state[theirs][name], rtol=2**-8 + 1e-5, atol=1e-9)


def test_pieces_change_nothing_and_bound_what_is_widened(tmp_path: Path) -> None:
    """Moments are widened a piece at a time, never all of them, and to the same bits."""
    fused, widest = torch._fused_adamw_, 0

    def watched(*tensors: Any, **options: Any) -> None:
        nonlocal widest
        widest = max(widest, sum(one.numel() for one in tensors[2]))
        fused(*tensors, **options)

    ends = []
    for piece in (2**20, 64):
        engine = engine_on(tiny_config(tmp_path), Layout(), moments="bfloat16")
        with patch.object(optimizer, "_PIECE", piece), patch.object(torch, "_fused_adamw_", watched):
            widest = 0
            ends.append((train(engine, 3), [state["exp_avg_sq"] for state in states(engine)]))
    assert widest == 64
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


def test_a_step_that_is_no_number_changes_nothing(small: Engine) -> None:
    """Where gradients are not finite, masters and moments keep their bits."""
    train(small, 2)
    before = [{name: value.clone() for name, value in state.items()} for state in states(small)]
    small.optimizer.step(1e-2, torch.tensor(torch.nan))
    for old, new in zip(before, states(small), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in ("master", *SMALL))


# --- what betas they follow -------------------------------------------------------------------------------------------


def drift(folder: Path, betas: tuple[float, float]) -> tuple[float, float]:
    """How far bfloat16 moments are from float32 ones after 1,200 steps whose gradients shrink tenfold.

    Returns:
        The mean error of the root of the second moment, which divides a step, with its sign; the first moment's error
        as a share of its norm.
    """
    kinds: tuple[MomentsDtype, ...] = ("float32", "bfloat16")
    found = []
    for kind in kinds:
        engine = engine_on(folder, Layout(layers=(1,)), moments=kind)
        engine.optimizer.config = replace(engine.optimizer.config, betas=betas)
        generator = torch.Generator().manual_seed(1)
        for step in range(1200):
            give_gradients(engine, 10.0 ** (-step / 1200), generator)
            engine.optimizer.step(0.0)
        found.append([torch.cat([state[name].float() for state in states(engine)]) for name in SMALL])
    (first, second), (rounded_first, rounded_second) = found
    there = second > 0  # not padding
    root = (rounded_second[there] / second[there]).sqrt().mean().item() - 1
    return root, ((rounded_first - first).norm() / first.norm()).item()


@pytest.mark.parametrize("betas", [OptimizerConfig().betas, (0.9, LIMIT), (LIMIT, 0.95)], ids=str)
def test_betas_that_are_allowed_are_followed(tmp_path: Path, betas: tuple[float, float]) -> None:
    """Up to the limit the second moment is right within half a percent, and the first within 2 % of its norm."""
    root, first = drift(tiny_config(tmp_path, num_hidden_layers=1), betas)
    assert abs(root) < 0.005
    assert first < 0.02


def test_betas_that_are_refused_are_not_followed(tmp_path: Path) -> None:
    """At 0.998 the second moment does not come down with the gradients: its root is too large by half and more.

    The rule that refuses it is among those of tests/test_config_validate.py.
    """
    root, _ = drift(tiny_config(tmp_path, num_hidden_layers=1), (0.9, 0.998))
    assert root > 0.5


# --- checkpoints ------------------------------------------------------------------------------------------------------

MODEL = {"vocab_size": 301, "num_key_value_heads": 2}


def save_on_rank(
    rank: int, folder: Path, layout: Layout, target: Path, moments: MomentsDtype
) -> tuple[list[Held], Trained, list[Held]]:
    """Three steps, a checkpoint from a copy in host memory, three more."""
    engine = engine_on(folder, layout, moments=moments)
    train(engine, 3)
    at_save = held_slices(engine)
    save(target, engine, 3, asynchronous="auto")
    return at_save, train(engine, 3), held_slices(engine)


def load_on_rank(
    rank: int, folder: Path, layout: Layout, checkpoint: str, moments: MomentsDtype
) -> tuple[str | None, list[Held], Trained, list[Held]]:
    """What is said of the moments, the state after loading, three steps from there and the state at their end."""
    engine = engine_on(folder, layout, moments=moments)
    train(engine, 1)
    load_checkpoint(checkpoint, engine)
    loaded = held_slices(engine)
    return retyped_moments(checkpoint, engine), loaded, train(engine, 3), held_slices(engine)


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_a_checkpoint_is_bit_for_bit_on_any_layout(ranks: Ranks, tmp_path: Path, shard: Any) -> None:
    """Saved in two bytes each, moments come back on another grid; on the same one the run goes on bit for bit."""
    folder, layout = tiny_config(tmp_path / "model", **MODEL), Layout(tp=2, dp=2, shard=shard)
    spec, checkpoint = spec_from_folder(folder), f"{tmp_path}/checkpoints/step-3"
    answers = ranks.run(4, save_on_rank, folder, layout, tmp_path / "checkpoints", "bfloat16")
    state, end = (assemble(spec, [answer[which] for answer in answers]) for which in (0, 2))
    tables = CheckpointReader(checkpoint).tensors()
    kinds = {name.partition(".")[0]: table.properties.dtype for name, table in tables.items()}
    assert kinds == {"weight": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}

    same = ranks.run(4, load_on_rank, folder, layout, checkpoint, "bfloat16")
    assert [after for _, _, after, _ in same] == [answers[0][1]] * 4
    assert differences(assemble(spec, [last for *_, last in same]), end, "weight", *SMALL) == []
    for other in (Layout(), Layout(pp=2, dp=2, shard="gradients")):
        found = ranks.run(other.world_size, load_on_rank, folder, other, checkpoint, "bfloat16")
        assert {said for said, *_ in found} == {None}
        assert differences(assemble(spec, [held for _, held, _, _ in found]), state, "weight", *SMALL) == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("float32", "bfloat16", "float32 in the checkpoint, rounded to bfloat16"),
        ("bfloat16", "float32", "bfloat16 in the checkpoint, widened to float32"),
    ],
)
def test_a_checkpoint_of_the_other_type_is_taken_and_told(
    ranks: Ranks, tmp_path: Path, before: MomentsDtype, after: MomentsDtype, says: str
) -> None:
    """float32 moments are rounded to nearest, bfloat16 ones widened; weights stay, and what was done is said."""
    folder, layout = tiny_config(tmp_path / "model", **MODEL), Layout(tp=2)
    spec = spec_from_folder(folder)
    answers = ranks.run(2, save_on_rank, folder, layout, tmp_path / "checkpoints", before)
    state = assemble(spec, [answer[0] for answer in answers])
    found = ranks.run(1, load_on_rank, folder, Layout(), f"{tmp_path}/checkpoints/step-3", after)
    assert found[0][0] == says
    loaded = assemble(spec, [found[0][1]])
    assert differences(loaded, state, "weight") == []
    for kind in SMALL:
        state[kind] = {name: value.bfloat16().float() for name, value in state[kind].items()}
    assert differences(loaded, state, *SMALL) == []


def test_room_for_a_copy_is_what_it_takes(small: Engine) -> None:
    """Copies of moments take half of what their masters' take."""
    wanted = [state[name].nbytes for state in states(small) for name in ("master", *SMALL)]
    assert snapshot_bytes(small) == wanted


# --- memory that is told before ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2), Layout(dp=4), Layout(dp=4, shard="full")], ids=str)
def test_check_and_closed_form_save_four_bytes_a_parameter(layout: Layout) -> None:
    """The trainer's own allocations fall by half of the moments, and the closed form by the same bytes."""
    kinds: tuple[MomentsDtype, ...] = ("float32", "bfloat16")
    run = resolved(layout, 4)
    plain, small = (
        rank_memory(replace(run, run=replace(run.run, optimizer=OptimizerConfig(moments=kind))), 0) for kind in kinds
    )
    told, told_small = (
        predict_memory(SPEC, run.layout, seq_len=1024, num_micro_batches=4, assumptions=replace(OURS, moments=kind))[0]
        for kind in kinds
    )
    saved = told.peak_allocated_bytes - told_small.peak_allocated_bytes
    assert saved == told_small.components["moments"] > 0
    # The allocator takes whole blocks of 512 bytes.
    assert plain.peak_bytes - small.peak_bytes == pytest.approx(saved, abs=512 * 2 * 2 * len(run.layout.layers) * 12)
    assert small.components["optimizer moments"] == pytest.approx(told_small.components["moments"], rel=0.01)


# --- learning ---------------------------------------------------------------------------------------------------------

VOCAB, SEQ, BATCH, STEPS, LAST = 64, 32, 8, 300, 20


def chain(count: int) -> Tensor:
    """Tokens of which each has three that may follow it, one of them more often."""
    generator = torch.Generator().manual_seed(7)
    following = torch.randint(0, VOCAB, (VOCAB, 3), generator=generator)
    picks = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), count, replacement=True, generator=generator)
    text = [1]
    for pick in picks.tolist():
        text.append(int(following[text[-1], pick]))
    return torch.tensor(text)


def losses(rank: int, folder: Path, moments: MomentsDtype) -> list[float]:
    """The loss of every step of a run that sees each token once."""
    engine = engine_for(folder, Layout(micro_batch=BATCH), SEQ, 1, moments, weights="random")
    text, tokens = chain(STEPS * BATCH * SEQ), BATCH * SEQ
    positions = torch.arange(SEQ).unsqueeze(1).expand(SEQ, BATCH)
    found = []
    for step in range(STEPS):
        part = text[step * tokens : (step + 1) * tokens + 1]
        inputs, targets = (half.view(BATCH, SEQ).t().contiguous() for half in (part[:-1], part[1:]))
        batch = Batch([StageInput(inputs, positions)], [targets], tokens)
        found.append(train_step(engine, batch, 3e-3 * min(1.0, (step + 1) / 30), 1.0)[0])
    return found


def test_a_model_learns_alike(ranks: Ranks, tmp_path: Path) -> None:
    """After 300 steps the mean of the last 20 losses is float32 moments' within 0.1 %, and the text has been learnt."""
    folder = tiny_config(tmp_path, vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.02)
    exact, small = (torch.tensor(ranks.run(1, losses, folder, kind)[0]) for kind in ("float32", "bfloat16"))
    assert exact[-LAST:].mean() < 0.5 * exact[0]
    assert small[-LAST:].mean().item() == pytest.approx(exact[-LAST:].mean().item(), rel=1e-3)
