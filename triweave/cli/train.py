"""`triweave train`."""

from __future__ import annotations

from pathlib import Path

from triweave.cli.options import Nproc, Overrides


def train(run_file: Path, /, *overrides: Overrides, nproc: Nproc = None) -> int:
    """Train what a run file describes.

    Every key of the file can be changed here: `--layout.tp 4`. Under torchrun each process is a rank; without it
    the ranks are started on this host.

    A running job, under any launcher and from any host that sees the folder, saves at the next step when the file
    `save-now` appears in its output_dir (touch runs/a/save-now), and removes the file when the checkpoint is on the
    disk. It saves and stops (exit code 75) when its processes get SIGTERM or SIGUSR1; the same command goes on from
    there.

    Example: triweave train run.yaml --nproc 6 --train.steps 20

    Args:
        run_file: The run file (docs/reference/run-file.md).
        overrides: Keys of the run file with new values.
        nproc: Ranks to start on this host; left out, as many as the layout has.
    """
    from triweave.recovery.stop import noting
    from triweave.training.start import Job, start, train_rank

    def job() -> Job:
        from triweave.training.endings import heard
        from triweave.training.resume_check import check_resume

        return Job(train_rank, check_resume, heard=heard)

    with noting() as stop:
        return start(run_file, overrides, nproc, job, stop=stop)
