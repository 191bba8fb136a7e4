"""Keys of other tools: each is answered with ours and the arithmetic between the two."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from triweave.config.foreign_keys import TABLE
from triweave.config.kinds import keys
from triweave.config.load import load_run
from triweave.config.schema import Run
from triweave.errors import InputError, Problem

SMALLEST = "model: {path: m}\ndata: {train: d.jsonl}\n"
OURS = {key.name: key for key in keys(Run)}
ROWS = [(name, row.ours) for row in TABLE for name in row.names]

EXPECTED = """
per_device_train_batch_size micro_batch_size local_batch_size batch_size: layout.micro_batch
gradient_accumulation_steps global_batch_size global_train_batch_size: train.global_batch
max_seq_length max_length sequence_len cutoff_len seq_length: data.seq_len
lr: optimizer.learning_rate
lr_scheduler_type: optimizer.lr_schedule
warmup_iters: optimizer.warmup_steps
num_train_epochs: train.epochs
max_steps train_iters: train.steps
gradient_checkpointing activation_checkpointing: layout.recompute
tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size: layout.tp
pipeline_model_parallel_size pipeline_parallel_degree pp_size: layout.pp
context_parallel_size context_parallel_degree cp_size sequence_parallel_size sp_size: layout.cp
sample_packing neat_packing: data.packing
assistant_only_loss train_on_inputs: data.loss_on
base_model model_name_or_path: model.path
save_steps: checkpoint.every_steps
eval_steps: validation.every_steps
logging_steps: log.every_steps
report_to: log.to
resume_from_checkpoint: resume
deepspeed fsdp fsdp_config: layout.shard
"""
REQUESTED = [
    (name, line.partition(": ")[2]) for line in EXPECTED.strip().splitlines() for name in line.partition(":")[0].split()
]


def answers(tmp_path: Path, text: str, *words: str) -> dict[str, Problem]:
    """What the loader says about each key that a file has beside the required ones."""
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST + text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_run(path, words)
    return {problem.key: problem for problem in caught.value.problems}


def test_table_leads_to_keys_that_exist() -> None:
    """Every row leads to one of our keys, or says why there is none."""
    assert [row.theirs for row in TABLE if row.ours is not None and row.ours not in OURS] == []
    assert [row.theirs for row in TABLE if row.ours is None and not row.says] == []


def test_a_name_stands_once() -> None:
    """No foreign key has two answers, and every row names at least one."""
    assert [name for name, count in Counter(name for name, _ in ROWS).items() if count > 1] == []
    assert all(row.names for row in TABLE)


def test_no_name_hides_ours() -> None:
    """A foreign key is never one of ours; the one exception means two things, and both are told."""
    leaves = {name.rpartition(".")[2] for name in OURS}
    assert {name for name, _ in ROWS} & leaves == {"sequence_parallel"}


@pytest.mark.parametrize(("name", "ours"), REQUESTED)
def test_requested_key(tmp_path: Path, name: str, ours: str) -> None:
    """The keys that people bring most often are answered with ours."""
    problem = answers(tmp_path, f"{name}: 2\n")[name]
    assert problem.nearest is not None
    assert problem.nearest.partition(":")[0] == ours
    assert f"here it is {ours}" in problem.rule


def test_anywhere_in_a_file(tmp_path: Path) -> None:
    """Every foreign key is recognised at the top, in a section of ours, in one of theirs, and on the command line."""
    for name, ours in ROWS:
        text = f"log: {{{name}: 1}}\nparallelism: {{{name}: 1}}\n"
        words = [] if name == "sequence_parallel" else [f"--{name.replace('_', '-')}=1"]
        for key, problem in answers(tmp_path, text, *words).items():
            if key != "parallelism":
                assert problem.rule.startswith("is a key of"), key
                assert (problem.nearest or "None").partition(":")[0] == str(ours), key


def test_foreign_section(tmp_path: Path) -> None:
    """A section of another tool is answered as a whole; in it, only what is recognised is told."""
    told = answers(tmp_path, "fsdp_config:\n  fsdp_version: 2\n  reshard_after_forward: true\n")
    assert {key: problem.nearest for key, problem in told.items()} == {
        "fsdp_config": "layout.shard",
        "fsdp_config.reshard_after_forward": "layout.shard: full",
    }


def test_foreign_section_in_an_unknown_one(tmp_path: Path) -> None:
    """In an unknown section everything is told, down to a section of another tool, which stands for its content."""
    told = answers(tmp_path, "grid: {zzz: 1, fsdp_config: {fsdp_version: 2, more: {yyy: 1}}}\n")
    assert list(told) == ["grid", "grid.zzz", "grid.fsdp_config"]


@pytest.mark.parametrize(
    ("text", "name", "sentence", "nearest"),
    [
        (
            "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nlayout: {dp: 4}\n",
            "gradient_accumulation_steps",
            "train.global_batch = micro_batch x accumulation x dp = 2 x 8 x 4 = 64",
            "train.global_batch: 64",
        ),
        (
            "micro_batch_size: 1\ngradient_accumulation_steps: 32\ncluster: 4x8xh100-80gb\nlayout: {tp: 8, pp: 2}\n",
            "gradient_accumulation_steps",
            "= 1 x 32 x 2 = 64",
            "train.global_batch: 64",
        ),
        (
            "micro_batch_size: 1\ngradient_accumulation_steps: 8\ntensor_parallel_degree: 4\ncluster: 1x8xh100-80gb\n",
            "gradient_accumulation_steps",
            "= 1 x 8 x 2 = 16",
            "train.global_batch: 16",
        ),
        (
            "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n",
            "gradient_accumulation_steps",
            "= 2 x 8 x dp = 16 x dp",
            "train.global_batch",
        ),
        (
            "gradient_accumulation_steps: 8\n",
            "gradient_accumulation_steps",
            "train.global_batch = micro_batch x accumulation x dp",
            "train.global_batch",
        ),
        (
            "learning_rate: 2e-5\nmin_lr_ratio: 0.1\n",
            "min_lr_ratio",
            "0.1 x 2e-05 = 2e-06",
            "optimizer.min_learning_rate: 2e-06",
        ),
        ("train_samples: 1000\ntrain: {global_batch: 8}\n", "train_samples", "1000 / 8 = 125", "train.steps: 125"),
        (
            "max_tokens: 1000000\nglobal_batch_size: 8\nmax_seq_length: 1024\n",
            "max_tokens",
            "steps = tokens / (global_batch x seq_len) = 1000000 / (8 x 1024) = 122",
            "train.steps: 122",
        ),
        ("max_tokens: 1000000\n", "max_tokens", "steps = tokens / (global_batch x seq_len)", "train.steps"),
        (
            "num_tokens_per_train_step: 65536\ndata: {seq_len: 4096}\n",
            "num_tokens_per_train_step",
            "65536 / 4096 = 16",
            "train.global_batch: 16",
        ),
        ("distributed_timeout_minutes: 10\n", "distributed_timeout_minutes", "60 x 10 = 600", "runtime.timeout_s: 600"),
        ("adam_beta1: 0.9\nadam_beta2: 0.95\n", "adam_beta2", "a list of both", "optimizer.betas: [0.9, 0.95]"),
        ("adam_beta1: 0.9\n", "adam_beta1", "a list of both", "optimizer.betas: [BETA1, BETA2]"),
        (
            "dp_replicate_size: 2\ndp_shard_size: 8\n",
            "dp_shard_size",
            "layout.dp = replicas x shards = 2 x 8 = 16, layout.shard_group = shards = 8",
            "layout.dp: 16",
        ),
        (
            "data_parallel_size: 16\nnum_distributed_optimizer_instances: 4\n",
            "num_distributed_optimizer_instances",
            "layout.shard_group = dp x cp / instances = 16 / 4 = 4",
            "layout.shard_group: 4",
        ),
        (
            "data_parallel_shard_degree: -1\n",
            "data_parallel_shard_degree",
            "left out, it is the ranks divided by",
            "layout.dp",
        ),
        (
            "num_layers: 80\npp_size: 4\nnum_layers_per_virtual_pipeline_stage: 5\n",
            "num_layers_per_virtual_pipeline_stage",
            "= 80 / (4 x 5) = 4",
            "layout.vpp: 4",
        ),
        (
            "dp_replicate_size: 2\ndp_shard_size: 4\nmicro_batch_size: 1\ngradient_accumulation_steps: 3\n",
            "gradient_accumulation_steps",
            "= 1 x 3 x 8 = 24",
            "train.global_batch: 24",
        ),
        (
            "dp_shard_size: 4\nmicro_batch_size: 1\ngradient_accumulation_steps: 3\n",
            "gradient_accumulation_steps",
            "= 1 x 3 x 4 = 12",
            "train.global_batch: 12",
        ),
        ("dp_shard_size: 4\n", "dp_shard_size", "the product of replicas and shards", "layout.dp: 4"),
        ("max_duration: 2ep\n", "max_duration", "2ep is train.epochs: 2", "train.epochs: 2"),
        ("zero_stage: 2\n", "zero_stage", "gradients (ZeRO-2)", "layout.shard: gradients"),
        (
            "use_distributed_optimizer: true\n",
            "use_distributed_optimizer",
            "Megatron's distributed optimizer",
            "layout.shard: optimizer",
        ),
        ("train_on_inputs: false\n", "train_on_inputs", "true is all, false is assistant", "data.loss_on: assistant"),
        (
            "gradient_checkpointing: true\n",
            "gradient_checkpointing",
            "[layer] is full checkpointing",
            "layout.recompute: [layer]",
        ),
        (
            "pipeline_parallel_schedule: Interleaved1F1B\n",
            "pipeline_parallel_schedule",
            "",
            "layout.schedule: interleaved",
        ),
        ("resume_from_checkpoint: true\n", "resume_from_checkpoint", "", "resume: auto"),
        ("lora_r: 8\n", "lora_r", "there is no such key here: every weight is trained", None),
    ],
)
def test_arithmetic(tmp_path: Path, text: str, name: str, sentence: str, nearest: str | None) -> None:
    """Where two keys do not hold the same number, the sum is shown with the numbers of the file."""
    merged = text.replace("data: {", "data: {train: d.jsonl, ")
    path = tmp_path / "run.yaml"
    path.write_text(merged + ("model: {path: m}\n" if merged != text else SMALLEST), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_run(path)
    told = {problem.key: problem for problem in caught.value.problems}[name]
    assert sentence in told.rule
    assert told.nearest == nearest


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sequence_parallel_size", ["one sequence's attention", "Megatron's splitting of activations"]),
        ("sequence_parallel", ["Megatron's meaning", "layout.cp"]),
        ("batch_size", ["two things", "layout.micro_batch", "train.global_batch"]),
        ("max_length", ["tokens of one training sequence", "data.too_long"]),
    ],
)
def test_words_with_two_meanings(tmp_path: Path, name: str, words: list[str]) -> None:
    """A word that means two things among the tools is defined where it is answered."""
    rule = answers(tmp_path, f"{name}: 2\n")[name].rule
    assert [word for word in words if word not in rule] == []


def test_hostile_values(tmp_path: Path) -> None:
    """Arithmetic with values of any kind ends in an answer."""
    for value in ("0", "-1", "true", "null", "x", "[1]", "{a: 1}", "1e400", ".5", "'2'"):
        text = "".join(f"{name}: {value}\n" for name, _ in ROWS)
        text += f"learning_rate: {value}\ntp: {value}\ncluster: 1x8xh100-80gb\n"
        assert len(answers(tmp_path, text)) > len(ROWS)
