"""`validate`: every check across keys, files, model and cluster, all told before anything starts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from triweave.config import validate as module
from triweave.config.document import to_yaml
from triweave.config.load import load_run
from triweave.config.schema import DataConfig, LayoutConfig, ModelConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun, validate
from triweave.errors import InputError, Problem
from triweave.model_spec import spec_from_hf_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that can start, in a folder of its own that holds all it names."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    for name in ("train.jsonl", "held-out.jsonl", "template.jinja"):
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "checkpoint").mkdir()
    return Run(
        model=ModelConfig(path="model", weights="random"),
        data=DataConfig(train=("train.jsonl",), seq_len=128),
        train=TrainConfig(steps=10, global_batch=8),
    )


def changed(run: Run, **sections: Any) -> Run:
    """`run` with keys replaced: a mapping changes keys of a section, anything else a key at the top."""
    new = {
        name: replace(getattr(run, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return replace(run, **new)


def problems_of(run: Run, **started: int) -> list[Problem]:
    """What is told about a run that cannot start."""
    with pytest.raises(InputError) as caught:
        validate(run, **started)
    return list(caught.value.problems)


@dataclass(frozen=True)
class Case:
    """One mistake: the keys that make it, and what is told."""

    key: str
    rule: str
    nearest: str | None = None
    sections: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.key}: {self.rule}"


def optimizer(key: str, value: float, rule: str, nearest: str | None = None) -> Case:
    """A wrong number of the optimizer."""
    return Case(f"optimizer.{key}", rule, nearest, {"optimizer": {key: value}})


VALUE_CASES = (
    optimizer("learning_rate", 0.0, "must be greater than 0"),
    optimizer("learning_rate", -1.0, "must be greater than 0"),
    optimizer("learning_rate", math.nan, "must be greater than 0"),
    optimizer("learning_rate", math.inf, "must be greater than 0"),
    optimizer("eps", 0.0, "must be greater than 0"),
    optimizer("min_learning_rate", -1e-6, "must be at least 0", "0.0"),
    optimizer("min_learning_rate", 1e-4, "must be at most learning_rate = 1e-05", "1e-05"),
    optimizer("weight_decay", -0.1, "must be at least 0", "0.0"),
    optimizer("max_grad_norm", -1.0, "must be at least 0", "0.0"),
    optimizer("warmup_steps", -1, "must be at least 0", "0"),
    optimizer("warmup_steps", 11, "must be at most train.steps = 10", "10"),
    optimizer("warmup_ratio", 1.0, "is a share of the run"),
    Case(
        "optimizer.warmup_steps",
        "excludes optimizer.warmup_ratio = 0.1",
        None,
        {"optimizer": {"warmup_steps": 1, "warmup_ratio": 0.1}},
    ),
    Case(
        "optimizer.min_learning_rate",
        "has no effect",
        "0.0",
        {"optimizer": {"min_learning_rate": 1e-6, "lr_schedule": "constant"}},
    ),
    Case("optimizer.betas[0]", "must be from 0 to below 1", "0.9", {"optimizer": {"betas": (1.0, 0.95)}}),
    Case("optimizer.betas[1]", "must be from 0 to below 1", "0.95", {"optimizer": {"betas": (0.9, -0.1)}}),
    Case(
        "optimizer.betas[1]",
        "leaves 1 - beta = 0.001, and optimizer.moments: bfloat16 needs at least 0.015625",
        "0.984375",
        {"optimizer": {"betas": (0.9, 0.999), "moments": "bfloat16"}},
    ),
    Case(
        "optimizer.betas[0]",
        "needs at least 0.015625",
        "0.984375",
        {"optimizer": {"betas": (0.985, 0.95), "moments": "bfloat16"}},
    ),
    Case("train", "does not say how long", None, {"train": {"steps": None}}),
    Case("train.steps", "excludes train.epochs = 2", None, {"train": {"epochs": 2.0}}),
    Case("train.steps", "must be at least 1", "1", {"train": {"steps": 0}}),
    Case("train.epochs", "must be greater than 0", None, {"train": {"steps": None, "epochs": 0.0}}),
    Case("train.global_batch", "must be at least 1", "1", {"train": {"global_batch": 0}}),
    Case("data.seq_len", "must be at least 1", "1", {"data": {"seq_len": 0}}),
    Case("data.validation", "is a share of the examples", "0.01", {"data": {"validation": 1.0}}),
    Case("data.validation", "is a share of the examples", "0.01", {"data": {"validation": -0.1}}),
    Case("validation.every_steps", "must be at least 0", "0", {"validation": {"every_steps": -1}}),
    Case(
        "validation.every_steps",
        "has nothing to measure",
        "0",
        {"data": {"validation": 0.0}, "validation": {"every_steps": 5}},
    ),
    Case("validation.max_batches", "must be at least 1", "1", {"validation": {"max_batches": 0}}),
    Case("checkpoint.every_steps", "must be at least 0", "0", {"checkpoint": {"every_steps": -1}}),
    Case("checkpoint.keep", "must be at least 1", "1", {"checkpoint": {"keep": 0}}),
    Case("log.every_steps", "must be at least 1", "1", {"log": {"every_steps": 0}}),
    Case("runtime.timeout_s", "must be at least 1", "1", {"runtime": {"timeout_s": 0}}),
    Case("seed", "must be from 0", "0", {"seed": -1}),
    Case("seed", "must be from 0", "0", {"seed": 2**63}),
)
FILE_CASES = (
    Case("data.train", "must name at least one", None, {"data": {"train": ()}}),
    Case("data.train", "does not exist", "train.jsonl", {"data": {"train": ("train.jsonl", "trian.jsonl")}}),
    Case("data.train", "does not exist", None, {"data": {"train": ("",)}}),
    Case("data.train", "does not exist", None, {"data": {"train": ("x" * 5000,)}}),
    Case("data.train", "does not exist", None, {"data": {"train": ("a\0b",)}}),
    Case("data.validation", "does not exist", "held-out.jsonl", {"data": {"validation": "heldout.jsonl"}}),
    Case("data.chat_template", "does not exist", "template.jinja", {"data": {"chat_template": "tmplate.jinja"}}),
    Case("checkpoint.path", "must name a folder or a URL", "null", {"checkpoint": {"path": ""}}),
    Case("data.chat_template", "is a folder", None, {"data": {"chat_template": "model"}}),
    Case("data.tokenizer", "does not exist", "model", {"data": {"tokenizer": "modle"}}),
    Case("data.tokenizer", "has no tokenizer.json", None, {"data": {"tokenizer": "checkpoint"}}),
    Case("data.tokenizer", "is a file", "model", {"data": {"tokenizer": "model/tokenizer.json"}}),
    Case("output_dir", "is a file", None, {"output_dir": "train.jsonl"}),
    Case("output_dir", "cannot be made: train.jsonl is a file", None, {"output_dir": "train.jsonl/runs/a"}),
    Case("output_dir", "must name a folder", "runs/run", {"output_dir": ""}),
    Case("resume", "must be auto, never or", "never", {"resume": "nver"}),
    Case("resume", "must be auto, never or", None, {"resume": ""}),
    Case("resume", "must be auto, never or", None, {"resume": "train.jsonl"}),
)
LAYOUT_CASES = (
    Case("layout.tp", "must divide the 4 attention heads", "4", {"layout": {"tp": 8}}),
    Case("layout.layers", "must be even, balanced or", "even", {"layout": {"layers": ()}}),
    Case("layout.layers", "sums to 3; the model has 4", "[2, 2]", {"layout": {"pp": 2, "layers": (1, 2)}}),
    Case("layout.pp", "5 stages for the model's 4 layers", "4", {"layout": {"pp": 5}}),
    Case("data.seq_len", "must be a multiple of 2 x cp = 2 x 3 = 6", "126", {"layout": {"cp": 3}}),
    Case(
        "model.attention",
        "gives no part of an attention",
        "auto",
        {"layout": {"cp": 2}, "model": {"attention": "efficient"}},
    ),
    Case("model.attention", "has no kernel for packed documents", "auto", {"model": {"attention": "cudnn"}}),
    Case("layout.dp", "must be at least 1", "1", {"layout": {"dp": 0}}),
    Case("data.seq_len", "max_position_embeddings = 128", "128", {"data": {"seq_len": 256}}),
    Case(
        "train.global_batch", "must be a multiple of micro_batch x dp = 3 x 1 = 3", "9", {"layout": {"micro_batch": 3}}
    ),
    Case("cluster", "must be NODESxGPUSxGPU", "4x8xh100-80gb", {"cluster": "8xh100"}),
    Case("layout.dp", "and there are 8 ranks", "4", {"cluster": "1x8xh100-80gb", "layout": {"tp": 2, "dp": 2}}),
    Case("layout.pp", "must divide the 8 ranks", "2", {"cluster": "1x8xh100-80gb", "layout": {"pp": 3}}),
)


class TestProblems:
    @pytest.mark.parametrize("case", [*VALUE_CASES, *FILE_CASES, *LAYOUT_CASES], ids=str)
    def test_told(self, run: Run, case: Case) -> None:
        """A mistake is told once, with its key, the rule and the nearest legal value."""
        (problem,) = problems_of(changed(run, **case.sections))
        assert problem.key == case.key
        assert problem.rule.startswith(case.rule) or case.rule in problem.rule
        assert problem.nearest == case.nearest

    @pytest.mark.parametrize(
        "sections",
        [
            {"optimizer": {"min_learning_rate": 1e-5, "warmup_steps": 10, "betas": (0.0, 0.0), "weight_decay": 0.0}},
            {"optimizer": {"min_learning_rate": 1e-6, "warmup_ratio": 0.0, "max_grad_norm": 0.0}},
            {"optimizer": {"lr_schedule": "constant", "warmup_steps": 0}},
            {"optimizer": {"betas": (0.999, 0.9999)}},
            {"optimizer": {"betas": (0.0, 0.984375), "moments": "bfloat16"}},
            {"train": {"steps": None, "epochs": 0.5}, "optimizer": {"warmup_steps": 10**6}},
            {"train": {"steps": 1}, "checkpoint": {"keep": 1}, "runtime": {"timeout_s": 1}},
            {"validation": {"every_steps": 5, "max_batches": 1}},
            {"data": {"validation": "held-out.jsonl"}, "validation": {"every_steps": 1}},
            {"data": {"validation": 0.0}},
            {"model": {"attention": "cudnn"}, "runtime": {"device": "cpu"}},
            {"model": {"attention": "efficient"}, "layout": {"tp": 4}},
            {"seed": 0},
            {"seed": 2**63 - 1},
        ],
    )
    def test_legal_extremes(self, run: Run, sections: dict[str, Any]) -> None:
        """Values at the edge of what is legal are accepted."""
        assert validate(changed(run, **sections))

    def test_all_at_once(self, run: Run) -> None:
        """Mistakes of every kind are told together, a missing model included."""
        wrong = changed(
            run,
            model={"path": "modle"},
            data={"train": ("nothing",), "validation": 2.0},
            layout={"vpp": 2, "recompute": ("layer", "mlp")},
            optimizer={"eps": 0.0},
            cluster="4x8xh900",
            resume="later",
        )
        assert {problem.key for problem in problems_of(wrong)} == {
            *("model.path", "data.train", "data.validation", "layout.vpp", "layout.recompute"),
            *("optimizer.eps", "cluster", "resume"),
        }

    def test_tokenizer_is_needed_unless_tokens(self, run: Run) -> None:
        """A model folder without tokenizer is refused, unless the data is tokenised already."""
        Path("model/tokenizer.json").unlink()
        (problem,) = problems_of(run)
        assert (problem.key, problem.nearest) == ("model.path", None)
        assert problem.rule.startswith("has no tokenizer.json")
        assert validate(changed(run, data={"format": "tokens"}))

    def test_model_problems_are_passed_on(self, run: Run) -> None:
        """What is wrong with the model's own config is told with its file."""
        wrong = CONFIG | {"hidden_act": "gelu", "mlp_bias": True}
        Path("model/config.json").write_text(json.dumps(wrong), encoding="utf-8")
        assert {problem.key for problem in problems_of(run)} == {"hidden_act", "mlp_bias"}

    def test_unreadable_model(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """A model folder that may not be entered is told with the system's reason."""

        def refuse(folder: Path) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(module, "spec_from_folder", refuse)
        assert [problem.rule for problem in problems_of(run)] == ["cannot be read (Permission denied)"]


class TestWeights:
    def test_checked_when_loaded(self, run: Run) -> None:
        """With `weights: load` the folder's tensors must be the model's; `random` does not look at them."""
        loading = changed(run, model={"weights": "load"})
        assert "has neither" in problems_of(loading)[0].rule
        tensors = {t.name: np.zeros(t.shape, np.float32) for t in spec_from_hf_config(CONFIG).tensors()}
        save_file(tensors, "model/model.safetensors")
        assert validate(loading).spec.num_hidden_layers == 4
        save_file(tensors | {"model.norm.weight": np.zeros(15, np.float32)}, "model/model.safetensors")
        (problem,) = problems_of(loading)
        assert "model.norm.weight is [15]" in problem.rule
        assert validate(run)


class TestWorld:
    @pytest.mark.parametrize(
        ("layout", "cluster", "started", "dp", "per_node"),
        [
            ({}, None, {}, 1, 1),
            ({"tp": 2, "pp": 2}, None, {}, 1, 4),
            ({"tp": 2, "dp": 2}, None, {}, 2, 4),
            ({"tp": 2}, None, {"world_size": 8}, 4, 8),
            ({"tp": 2}, None, {"world_size": 8, "gpus_per_node": 4}, 4, 4),
            ({"tp": 2}, "2x4xh100-80gb", {}, 4, 4),
            ({"tp": 2}, "2x4xh100-80gb", {"world_size": 8}, 4, 4),
            ({"tp": 2}, "2x4xh100-80gb", {"world_size": 8, "gpus_per_node": 2}, 4, 2),
            ({"tp": 2, "pp": 2, "dp": 2}, "1x8xcpu", {"world_size": 8}, 2, 8),
        ],
    )
    def test_resolved(
        self, run: Run, layout: dict[str, Any], cluster: str | None, started: dict[str, int], dp: int, per_node: int
    ) -> None:
        """The data-parallel size follows from the ranks that were started, else the cluster, else the layout."""
        resolved = validate(changed(run, layout=layout, cluster=cluster), **started)
        assert (resolved.layout.dp, resolved.gpus_per_node) == (dp, per_node)
        assert str(resolved.cluster) == str(cluster)
        assert resolved.num_micro_batches == 8 // dp

    @pytest.mark.parametrize(
        ("cluster", "started", "nearest"),
        [("4x8xh100-80gb", 8, "1x8xh100-80gb"), ("4x8xh100-80gb", 6, "1x6xh100-80gb"), ("1x2xcpu", 8, "4x2xcpu")],
    )
    def test_cluster_against_ranks(self, run: Run, cluster: str, started: int, nearest: str) -> None:
        """A cluster of another size than the ranks that were started is told with both numbers."""
        (problem,) = problems_of(changed(run, cluster=cluster, train={"global_batch": 24}), world_size=started)
        assert f"{started} ranks were started" in problem.rule
        assert problem.nearest == nearest

    def test_tensor_parallel_leaves_its_node(self, run: Run) -> None:
        """A tensor-parallel group over two nodes is refused unless the run allows it."""
        crossing = changed(run, layout={"tp": 4}, cluster="2x2xh100-80gb")
        assert [problem.key for problem in problems_of(crossing)] == ["layout.tp"]
        assert validate(changed(crossing, layout={"tp_across_nodes": True}))


class TestResolved:
    @pytest.mark.parametrize(
        ("wanted", "layers"), [("even", (2, 1, 1)), ("balanced", (2, 1, 1)), ((1, 1, 2), (1, 1, 2))]
    )
    def test_layers(self, run: Run, wanted: Any, layers: tuple[int, ...]) -> None:
        """The layers of every stage are filled in, in the three ways a run can give them."""
        assert validate(changed(run, layout={"pp": 3, "layers": wanted})).layout.layers == layers

    def test_balanced_weighs_the_head(self, run: Run) -> None:
        """A large vocabulary takes layers off the last stage when they are balanced."""
        Path("model/config.json").write_text(json.dumps(CONFIG | {"vocab_size": 640}), encoding="utf-8")
        assert validate(changed(run, layout={"pp": 2, "layers": "even"})).layout.layers == (2, 2)
        assert validate(changed(run, layout={"pp": 2, "layers": "balanced"})).layout.layers == (3, 1)

    def test_every_key_of_the_layout_arrives(self, run: Run) -> None:
        """No key of the run file's layout is lost on the way to the grid."""
        given = LayoutConfig(
            tp=2, pp=2, vpp=2, dp=2, micro_batch=2, sequence_parallel=False, schedule="interleaved",
            shard="full", recompute=("norm", "attention"), layers=(1, 1, 1, 1),
        )  # fmt: skip
        layout = validate(replace(run, layout=given)).layout
        kept = {name: getattr(given, name) for name in given.__dataclass_fields__ if name != "tp_across_nodes"}
        assert {name: getattr(layout, name) for name in kept} == kept

    def test_nothing_is_changed(self, run: Run, tmp_path: Path) -> None:
        """The run comes back as it was given, and no file is made, also when the run is refused."""
        before = sorted(tmp_path.rglob("*"))
        resolved = validate(run)
        assert isinstance(resolved, ResolvedRun)
        assert resolved.run is run
        problems_of(changed(run, resume="x"))
        assert sorted(tmp_path.rglob("*")) == before

    def test_resolved_copy_validates_too(self, run: Run, tmp_path: Path) -> None:
        """The copy with every key, as the run directory keeps it, resolves to the same run."""
        path = tmp_path / "copy.yaml"
        path.write_text(to_yaml(run), encoding="utf-8")
        assert validate(load_run(path)) == validate(run)

    def test_folders_and_paths_are_data(self, run: Run) -> None:
        """A folder of training files, a file of held-out data and a template are accepted."""
        data = {"train": ("checkpoint",), "validation": "held-out.jsonl", "chat_template": "template.jinja"}
        assert validate(changed(run, data=data, resume="checkpoint", output_dir="new/deeper"))
