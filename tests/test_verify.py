"""`verify` names the first thing that differs, for each of the mistakes that it exists for."""

from __future__ import annotations

import json
from pathlib import Path

import faults
import pytest
from parity import make_reference, make_samples, verify_on_rank
from ranks import Ranks
from tiny_models import tiny_llama

from triweave.layout import Layout
from triweave.verify.compare import Tolerance, judge

GRID = Layout(tp=2, pp=2)
FAULTS = {
    "norm gradients not reduced": (
        faults.norm_gradients_not_reduced,
        GRID,
        {},
        "model.layers.0.input_layernorm.weight",
    ),
    "replicated heads not reduced": (
        faults.replicated_heads_not_reduced,
        Layout(tp=8),
        {},
        "model.layers.0.self_attn.k_proj.weight",
    ),
    "gate and up cut as one": (faults.gate_and_up_cut_as_one, GRID, {}, "model.layers.0.mlp"),
    "layers off by one": (
        faults.layers_off_by_one_after_the_first_stage,
        GRID,
        {},
        "model.layers.2.input_layernorm",
    ),
    "loss averaged per micro-batch": (faults.loss_averaged_per_micro_batch, GRID, {}, "loss"),
    "rotary pairs interleaved": (faults.rotary_pairs_interleaved, GRID, {}, "model.layers.0.self_attn"),
    "shard groups not summed": (
        faults.shard_groups_not_summed,
        Layout(dp=4, shard_group=2),
        {},
        "model.embed_tokens.weight",
    ),
    "one unit not summed across": (
        faults.one_unit_not_summed_across,
        Layout(dp=4, shard="full", shard_group=2),
        {},
        "model.layers.2.input_layernorm.weight",
    ),
    "positions a slice off": (faults.positions_a_slice_off, Layout(cp=2), {}, "model.layers.0.self_attn"),
    "context gradients not reduced": (
        faults.context_gradients_not_reduced,
        Layout(cp=2),
        {},
        "model.embed_tokens.weight",
    ),
    "tied copies not reduced": (
        faults.tied_copies_not_reduced,
        GRID,
        {"tie_word_embeddings": True},
        "model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize(("fault", "layout", "model", "named"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_fault_is_named(
    ranks: Ranks, tmp_path: Path, fault: object, layout: Layout, model: dict[str, object], named: str
) -> None:
    """The verdict is no, and the first difference is where the mistake was planted."""
    folder = tiny_llama(tmp_path / "model", **model)
    samples = make_samples(4, 1, 16, 300, packed=False)
    reference = make_reference(folder, samples, tmp_path / "reference.safetensors")
    verdict = ranks.run(layout.world_size, verify_on_rank, folder, layout, samples, reference, fault)[0]
    assert not verdict.passed
    assert verdict.first_difference == named


OUTPUTS = {"model.embed_tokens": 0.0, "model.layers.0.mlp": 0.0, "lm_head": 0.0}
GRADIENTS = {"model.layers.10.mlp.up_proj.weight": 0.0, "model.layers.2.mlp.up_proj.weight": 0.0}


class TestJudge:
    """The order in which differences are named."""

    def verdict(self, **changed: object):
        """A verdict in which only what is given is wrong."""
        loss = changed.get("loss", 1.0)
        outputs = {**OUTPUTS, **changed.get("outputs", {})}
        gradients = {**GRADIENTS, **changed.get("gradients", {})}
        return judge(1.0, loss, outputs, gradients, 11, Tolerance())

    def test_equal(self) -> None:
        """Nothing differs."""
        assert self.verdict().passed

    def test_outputs_go_before_loss_and_gradients(self) -> None:
        """An output that differs explains everything after it."""
        verdict = self.verdict(outputs={"lm_head": 1.0}, loss=2.0, gradients={"model.layers.2.mlp.up_proj.weight": 1.0})
        assert verdict.first_difference == "lm_head"

    def test_layers_in_numerical_order(self) -> None:
        """Layer 2 comes before layer 10."""
        wrong = dict.fromkeys(GRADIENTS, 1.0)
        assert self.verdict(gradients=wrong).first_difference == "model.layers.2.mlp.up_proj.weight"

    @pytest.mark.parametrize("where", ["outputs", "gradients", "loss"])
    def test_nan_never_passes(self, where: str) -> None:
        """A NaN differs from everything."""
        nan = float("nan")
        changed = {"outputs": {"lm_head": nan}, "gradients": {"model.layers.2.mlp.up_proj.weight": nan}, "loss": nan}
        assert not self.verdict(**{where: changed[where]}).passed

    def test_json_answer(self) -> None:
        """The documented keys, and nothing that JSON cannot hold."""
        answer = json.loads(json.dumps(self.verdict(loss=1.5).to_json()))
        assert answer == {
            "pass": False,
            "loss": {"reference": 1.0, "layout": 1.5, "abs": 0.5},
            "worst_gradient": {"name": "model.layers.10.mlp.up_proj.weight", "rel": 0.0},
            "first_difference": "loss",
        }
