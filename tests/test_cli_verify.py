"""`triweave verify`: yes, with the documented JSON; no, with the name of what differs; and both as exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import linked_workspace, made_once, make_workspace, python, triweave

# triweave, but for the weights that rank 3 reads of one product. Ranks import this file too.
DRIVER = """\
import torch.distributed as dist

from triweave.checkpoint.hugging_face_read import WeightReader

read = WeightReader.read


def read_wrongly(self, name, **how):
    wrong = dist.get_rank() == 3 and name == "model.layers.2.mlp.down_proj.weight"
    return read(self, name, **how) * (1.01 if wrong else 1)


WeightReader.read = read_wrongly

if __name__ == "__main__":
    from triweave.cli import main

    main()
"""

# triweave, but for a line where something is computed that says which kernels torch may take. Ranks import it too.
TELLER = """\
import sys

import torch

from triweave.dryrun import on_gpu
from triweave.training import loop
from triweave.verify import run


def telling(function, name):
    def told(*arguments):
        print(name, torch.are_deterministic_algorithms_enabled(), file=sys.stderr, flush=True)
        return function(*arguments)

    return told


run.compute_reference = telling(run.compute_reference, "reference")
run.compare_with_reference = telling(run.compare_with_reference, "layout")
loop.train_step = telling(loop.train_step, "step")
on_gpu.train_step = telling(on_gpu.train_step, "alone")

if __name__ == "__main__":
    from triweave.cli import main

    main()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that is only read."""
    return made_once(tmp_path_factory, "inputs", make_workspace)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_good_layout_passes(source: Path, tmp_path: Path, dtype: str) -> None:
    """Exit code 0, and nothing on standard output but one JSON document with the keys of the contract."""
    folder = linked_workspace(source, tmp_path / "here")
    done = triweave("verify", "run.yaml", "--json", f"--model.dtype={dtype}", cwd=folder)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert list(answer) == ["pass", "loss", "worst_gradient", "first_difference"]
    assert list(answer["loss"]) == ["reference", "layout", "abs"]
    assert list(answer["worst_gradient"]) == ["name", "rel"]
    assert answer["pass"] is True
    assert answer["first_difference"] is None
    assert answer["loss"]["abs"] == abs(answer["loss"]["layout"] - answer["loss"]["reference"])
    assert answer["worst_gradient"]["rel"] < (1e-5 if dtype == "float32" else 0.1)
    # Rounding to bfloat16 is seen: this is not float32 under another name.
    assert (answer["worst_gradient"]["rel"] > 1e-3) == (dtype == "bfloat16")


def test_wrong_weights_of_one_rank_are_named(source: Path, tmp_path: Path) -> None:
    """One rank's slice is off by a hundredth: exit code 1, and the module that holds it is the first difference."""
    folder = linked_workspace(source, tmp_path / "here")
    (folder / "driver.py").write_text(DRIVER)
    done = python("driver", "verify", "run.yaml", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "DIFFERENT: the first to differ is model.layers.2.mlp"
    assert "error" not in done.stderr


@pytest.mark.parametrize(
    ("words", "computed"),
    [
        (("verify", "run.yaml", "--model.dtype=bfloat16"), {"layout": 4, "reference": 2}),
        (("train", "run.yaml", "--train.steps=1", "--optimizer.warmup_steps=0"), {"step": 4}),
        (("check", "run.yaml", "--on-gpu", "--device=cpu", "--rank=3"), {"alone": 4}),
    ],
    ids=["verify", "train", "check"],
)
def test_kernels_are_those_of_the_run(
    source: Path, tmp_path: Path, words: tuple[str, ...], computed: dict[str, int]
) -> None:
    """With `runtime.deterministic` every verb that computes for a run takes such kernels alone, its reference too."""
    folder = linked_workspace(source, tmp_path / "here")
    (folder / "driver.py").write_text(TELLER)
    done = python("driver", *words, "--runtime.deterministic=true", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stderr.splitlines() if line.startswith(tuple(computed)))
    assert told == [f"{name} True" for name, count in computed.items() for _ in range(count)]
