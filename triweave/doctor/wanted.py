"""What a run asks of its machines. Imports no torch: what is wrong with the run file is told at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triweave.cluster import Cluster
from triweave.config.load import load_run
from triweave.config.validate import validate
from triweave.layout import Layout
from triweave.moments import MOMENTS_BYTES
from triweave.run_folder import EXPORTED_BYTES, MASTER_BYTES


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run asks of the machines; of a doctor without a run file, nothing."""

    layout: Layout | None = None
    cluster: Cluster | None = None
    saved_bytes: int = 0
    """That its checkpoints will take on the disk of its output folder, all that are kept and one that is written."""


def wanted_by(run_file: Path | None, world_size: int | None) -> tuple[Wanted, Path | None]:
    """What a run file asks, and its output folder.

    Args:
        run_file: the file; None asks nothing.
        world_size: ranks that a launcher has started; None before there are any.

    Raises:
        InputError: something is wrong with the run; data and weights need not be there.
    """
    if run_file is None:
        return Wanted(), None
    run = load_run(run_file, ())
    # Where it has a cluster, that is what it is meant for: that other machines were started is for the doctor to say.
    resolved = validate(run, world_size=None if run.cluster else world_size, dry=True)
    kept = run.checkpoint.keep + 1 if run.checkpoint.path is None else 0
    exported = EXPORTED_BYTES if run.checkpoint.export else 0
    saved = MASTER_BYTES + MOMENTS_BYTES[run.optimizer.moments]
    saved_bytes = resolved.spec.num_parameters * (saved * kept + exported)
    return Wanted(resolved.layout, resolved.cluster, saved_bytes), Path(run.output_dir)
