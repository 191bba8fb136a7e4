"""The fault campaign, in small: what `python bench/faults.py --quick` plants comes out as it must."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from command_line import environment

ROOT = Path(__file__).parent.parent


def test_quick_campaign_passes() -> None:
    """Kills, hangs, stop signals, a storm of restarts and other faults end as the table of the whole campaign says.

    Those of files on disk have a test of their own (`test_fault_cases.py`).
    """
    command = (sys.executable, "bench/faults.py", "--quick", "--only", "kills,hangs,stops,storms,public")
    done = subprocess.run(
        command, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(" in all |") == 5
