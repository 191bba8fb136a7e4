"""Megatron-LM's scripts: what we write we read back, and what others write is accounted for, argument by argument."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from launching import resolved_run, settings

from triweave.cli import main
from triweave.config.load import load_run
from triweave.config.validate import ResolvedRun, validate
from triweave.errors import InputError
from triweave.launch import megatron
from triweave.launch.megatron_arguments import export
from triweave.launch.megatron_import import NAMES, import_arguments, options, read_source, run_file_from
from triweave.launch.megatron_rows import ALWAYS, DEFAULTS, FROM_THE_MODEL, ROWS
from triweave.launch.megatron_script import Script, read_script

KNOWN = set(NAMES.read_text(encoding="utf-8").split())
LAYOUTS: list[dict[str, str | None]] = [
    {},
    {"layout__layers": "balanced"},
    {"layout__tp": "4"},
    {"layout__tp": "4", "layout__shard": "none"},
    {"layout__tp": "4", "layout__vpp": "5", "layout__schedule": "interleaved", "train__global_batch": "128"},
    {"layout__tp": "4", "layout__shard": "full", "layout__recompute": "[layer]"},
    {"layout__tp": "2", "layout__pp": "2", "layout__shard": "gradients", "layout__micro_batch": "2"},
    {"layout__tp": "2", "layout__shard_group": "2"},
    {"layout__tp": "2", "layout__pp": "2", "layout__shard": "full", "layout__shard_group": "4"},
    {"layout__recompute": "[norm,mlp]", "layout__sequence_parallel": "false"},
    {"layout__layers": "[21, 20, 20, 19]", "model__fp8": "true"},
    {"optimizer__moments": "bfloat16"},
    {"layout__tp": "4", "optimizer__moments": "bfloat16"},
    {"layout__tp": "2", "layout__pp": "2", "layout__shard": "full", "optimizer__moments": "bfloat16"},
    {"model__dtype": "float32", "train__steps": None, "train__epochs": "1"},
]


def script_of(run: ResolvedRun) -> str:
    """The script of a run."""
    (text,) = megatron.files(run, settings()).values()
    return text


@pytest.mark.parametrize("changed", LAYOUTS, ids=str)
def test_layout_comes_back(changed: dict[str, str | None], tmp_path: Path) -> None:
    """A run that is written as a Megatron script and read again has the same layout, batch and precision."""
    run = resolved_run(**changed)
    path = tmp_path / "run.yaml"
    path.write_text(run_file_from(read_script(script_of(run))), encoding="utf-8")
    again = validate(load_run(path, ["--cluster", "4x8xh100-80gb"]), dry=True)
    mine, theirs = run.layout, again.layout
    for field in ("tp", "pp", "vpp", "cp", "dp", "micro_batch", "layers", "schedule", "recompute", "shard_group"):
        assert getattr(mine, field) == getattr(theirs, field), field
    assert mine.uses_sequence_parallel == theirs.uses_sequence_parallel
    assert mine.dp == 1 or mine.shard == theirs.shard
    assert again.run.train.global_batch == run.run.train.global_batch
    assert (again.run.model.dtype, again.run.model.fp8) == (run.run.model.dtype, run.run.model.fp8)
    assert again.run.optimizer == run.run.optimizer


@pytest.mark.parametrize("changed", LAYOUTS, ids=str)
def test_every_argument_is_one_of_megatron(changed: dict[str, str | None]) -> None:
    """What is written are options that Megatron-Core 0.19.2's own parser lists, each of them once."""
    words = [word for word in read_script(script_of(resolved_run(**changed))).words if word.startswith("--")]
    assert set(words) <= KNOWN
    assert len(words) == len(set(words))


def test_every_row_is_of_a_known_option() -> None:
    """What the import knows are options of Megatron-Core 0.19.2."""
    assert (
        set(ROWS) | set(ALWAYS) | FROM_THE_MODEL | {name for _, names in DEFAULTS.values() for name in names} <= KNOWN
    )


def test_llama_3_70b_script_has_what_it_needs() -> None:
    """Four nodes of eight H100 for Llama-3-70B: the model's sizes, its traps avoided, FlashAttention 3."""
    given = options(read_script(script_of(resolved_run())).words)
    assert given["--tensor-model-parallel-size"] == ("8",)
    assert given["--pipeline-model-parallel-size"] == ("4",)
    assert given["--flash-attention-version"] == ("3",)
    # Without the switch Megatron takes no notice of the number, and dropouts are 0.1 unless it is told.
    assert {"--sequence-parallel", "--group-query-attention", "--num-query-groups", "--swiglu", "--bf16"} <= set(given)
    assert float(given["--attention-dropout"][0]) == float(given["--hidden-dropout"][0]) == 0
    assert 128256 % (8 * int(given["--make-vocab-size-divisible-by"][0])) == 0, "the vocabulary must not be padded"


def test_what_does_nothing_is_left_out_and_said() -> None:
    """At DP 1 nothing is shared out, and under flash attention no scores are recomputed: both are comments."""
    text = script_of(resolved_run(layout__recompute="[attention]"))
    given = options(read_script(text).words)
    assert not {"--use-distributed-optimizer", "--overlap-grad-reduce", "--recompute-modules"} & set(given)
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert "--use-distributed-optimizer" in comments
    assert "core_attn" in comments
    assert "--use-distributed-optimizer" in options(read_script(script_of(resolved_run(layout__tp="4"))).words)


def test_schedule_that_megatron_lacks_is_said() -> None:
    """A zero-bubble plan becomes 1F1B, and the script says so."""
    run = resolved_run(layout__schedule="zero-bubble")
    assert run.cluster is not None
    assert any("zero-bubble" in why for why in export(run, run.cluster).left_out)


def test_every_argument_is_accounted_for() -> None:
    """Each argument of a script appears once, with what became of it, whether it is known or not."""
    words = shlex.split(
        "--tensor-model-parallel-size 2 --swiglu --use-flash-attn --moe-grouped-gemm --no-such-thing 3 --lr 1e-5"
        " --hidden-dropout 0.1 --bf16 --save $OUT"
    )
    found = {one.text: one for one in import_arguments(Script((), tuple(words))).arguments}
    fates = {
        "--tensor-model-parallel-size 2": "taken over",
        "--swiglu": "does nothing here",
        "--use-flash-attn": "does nothing here",
        "--moe-grouped-gemm": "has no counterpart, see to it",
        "--no-such-thing 3": "is no option of Megatron-Core 0.19.2",
        "--lr 1e-5": "taken over",
        "--hidden-dropout 0.1": "has no counterpart, see to it",
        "--bf16": "taken over",
        "--save '$OUT'": "has no counterpart, see to it",
    }
    assert {text: found[text].fate for text in fates} == fates
    defaults = [one for one in found.values() if one.fate == "not given, Megatron's default"]
    assert len(found) == len(fates) + len(defaults)


def test_small_moments_that_megatron_lacks_are_refused() -> None:
    """Megatron has moments in bfloat16 under its distributed optimizer alone: taken at DP 1, refused without."""
    run = resolved_run(layout__tp="4", layout__shard="none", optimizer__moments="bfloat16")
    with pytest.raises(InputError, match=r"layout.shard = none: .* nearest: optimizer$"):
        script_of(run)
    alone = options(read_script(script_of(resolved_run(optimizer__moments="bfloat16"))).words)
    assert {"--use-distributed-optimizer", "--use-precision-aware-optimizer"} <= set(alone)
    assert alone["--exp-avg-dtype"] == alone["--exp-avg-sq-dtype"] == ("bf16",)


@pytest.mark.parametrize(
    ("words", "fate", "moments"),
    [
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "taken over", "bfloat16"),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp32", "taken over", "float32"),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", "has no counterpart, see to it", "float32"),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
            "has no counterpart, see to it",
            "float32",
        ),
        ("--exp-avg-dtype fp32", "does nothing here", "float32"),
    ],
)
def test_types_of_moments_are_taken_together(words: str, fate: str, moments: str) -> None:
    """Both moments in one type that is ours are taken over; one alone, and smaller types, are left to see to."""
    found = import_arguments(Script((), tuple(words.split())))
    assert {one.fate for one in found.arguments if one.text.startswith("--exp-avg")} == {fate}
    assert found.run.optimizer.moments == moments


def test_megatrons_defaults_are_kept() -> None:
    """What a script does not say is what Megatron would have taken, not what we would."""
    run = import_arguments(Script((), ("--tensor-model-parallel-size", "2"))).run
    assert run.optimizer.betas == (0.9, 0.999)
    assert run.optimizer.weight_decay == 0.01
    assert (run.model.dtype, run.layout.sequence_parallel, run.layout.shard) == ("float32", False, "none")


SCRIPT = """\
#!/bin/bash
# it's a comment with a quote
export CUDA_DEVICE_MAX_CONNECTIONS=1  # don't
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<path>
TP=4
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE # of a node
    --nnodes $NUM_NODES
)
MODEL="--num-layers 24 \\
  --hidden-size 1024"
MORE=(--data-path "$CHECKPOINT_PATH/a b" --split 949,50,1)
MORE+=(--lr 1e-4)
if [ "$TP" -gt 1 ]; then
  MORE+=(--sequence-parallel)
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $MODEL "${MORE[@]}" --tensor-model-parallel-size=$TP 2>&1 | tee log.txt
"""


def test_script_is_read_as_bash_would() -> None:
    """Arrays, old-style strings, defaults, comments and continuations give the words that bash gives."""
    done = read_script(SCRIPT)
    assert options(done.launcher) == {"--nproc_per_node": ("8",), "--nnodes": ("2",)}
    assert options(done.words) == {
        "--num-layers": ("24",),
        "--hidden-size": ("1024",),
        "--data-path": ("$1/a b",),
        "--split": ("949,50,1",),
        "--lr": ("1e-4",),
        "--sequence-parallel": (),
        "--tensor-model-parallel-size": ("4",),
    }
    assert done.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    """A command in a script, and one in a substitution, are never executed."""
    mark = tmp_path / "mark"
    text = f"touch {mark}\nX=$(touch {mark}; echo 2)\npython pretrain_gpt.py --lr 1 --seed $X\n"
    assert options(read_script(text).words) == {"--lr": ("1",), "--seed": ("$(...)",)}
    assert not mark.exists()


@effort(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("ab-= \n\"'\\$(){}[]#;|&@*:?<>"), max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Whatever a script holds, it is read or refused with a message."""
    with contextlib.suppress(InputError):
        assert all(isinstance(word, str) for word in read_source("--lr 1 " + text).words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor-model-parallel-size eight", "--tensor-model-parallel-size = eight"),
        ("--pipeline-model-parallel-layout 'Et*2|x'", "layout.layers"),
        ("--lr-decay-style WSD", "lr_schedule"),
        ("no arguments here", "cannot be read"),
    ],
)
def test_wrong_values_are_told(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that an option cannot have, or that we have nothing for, is told with its key."""
    with pytest.raises(SystemExit) as left:
        main(["launch", f"--from-megatron={words}"])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_verb_writes_a_run_file(tmp_path: Path) -> None:
    """`launch --from-megatron SCRIPT --out FILE` writes a run file that loads."""
    (tmp_path / "script.sh").write_text(SCRIPT)
    with pytest.raises(SystemExit) as left:
        main(["launch", "--from-megatron", str(tmp_path / "script.sh"), "--out", str(tmp_path / "run.yaml")])
    assert left.value.code == 0
    assert load_run(tmp_path / "run.yaml").layout.tp == 4
