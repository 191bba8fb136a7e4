"""The end of memory: it is recognised, and the message says what the planner would change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triweave.config.load import load_run
from triweave.config.validate import ResolvedRun, validate
from triweave.recovery.out_of_memory import explain_out_of_memory, is_out_of_memory

RUN_FILE = """\
model: {path: meta-llama/Llama-3.1-8B}
cluster: 1x8xh100-80gb
layout: {dp: 8, micro_batch: 4, shard: none}
data: {train: unused.jsonl, seq_len: 8192}
train: {steps: 1, global_batch: 32}
"""


def resolved_run(folder: Path, *words: str) -> ResolvedRun:
    """A run that cannot fit: the whole of an 8B model's states on every card."""
    (folder / "run.yaml").write_text(RUN_FILE)
    return validate(load_run(folder / "run.yaml", words), dry=True)


def test_message_names_place_and_what_would_fit(tmp_path: Path) -> None:
    """Rank and place, the largest components, and single changes that the planner says would fit, cheapest first."""
    nearly = resolved_run(tmp_path, "--layout.shard=optimizer")
    said = explain_out_of_memory(MemoryError(), nearly, 3, "step 1, computing")
    first, predicted, *changes = said.splitlines()
    assert first.startswith("rank 3 is out of memory in step 1, computing")
    assert "GiB on pipeline rank 0" in predicted
    assert changes
    assert all(line.startswith("  fits with") for line in changes)


@pytest.mark.parametrize(("betas", "told"), [("[0.9, 0.95]", True), ("[0.9, 0.999]", False)])
def test_smaller_moments_are_told_where_the_betas_allow_them(tmp_path: Path, betas: str, told: bool) -> None:
    """Moments in bfloat16 are no way out for a run whose betas they could not follow."""
    words = ("--layout.tp=2", "--layout.dp=4", "--layout.recompute=[layer]", f"--optimizer.betas={betas}")
    nearly = resolved_run(tmp_path, *words)
    said = explain_out_of_memory(MemoryError(), nearly, 3, "step 1, computing")
    assert ("fits with moments bfloat16" in said) == told


def test_layout_far_from_fitting_gets_plan_s_answer(tmp_path: Path) -> None:
    """Where no single change helps, the message has the layout that plan would take."""
    said = explain_out_of_memory(MemoryError(), resolved_run(tmp_path), 3, "step 1, computing")
    assert "no single change makes it fit; plan's first answer is " in said


def test_message_without_a_cluster_says_what_is_missing(tmp_path: Path) -> None:
    """On a machine that the run file does not name there is nothing to plan for."""
    said = explain_out_of_memory(MemoryError(), resolved_run(tmp_path, "--cluster=null"), 0, "step 1")
    assert "give the run file a cluster" in said


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported at some other call"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shape"), False),
    ],
    ids=["GPU", "driver", "library", "Python", "address", "other"],
)
def test_end_of_memory_is_told_from_other_errors(error: BaseException, is_memory: bool) -> None:
    """Only what means memory is explained as such."""
    assert is_out_of_memory(error) == is_memory


def test_host_memory_that_is_refused_is_recognised() -> None:
    """What torch's CPU allocator raises under a limit of the process is the end of memory."""
    code = (
        "import resource, torch\n"
        "from triweave.recovery.out_of_memory import is_out_of_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\n"
        "try:\n    torch.empty(2**34, dtype=torch.uint8)\n"
        "except BaseException as error:\n    print(is_out_of_memory(error))\n"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr
