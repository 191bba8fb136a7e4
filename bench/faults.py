"""The fault campaign: plants faults of every kind into tiny runs on the CPU, and tells how each came out.

python bench/faults.py                                  # all of it
python bench/faults.py --quick                          # a sample, in about 40 s on two idle cores
python bench/faults.py --only kills,hangs               # some of it
python bench/faults.py --out bench/results/2026-11-30-faults.md
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from fault_cases.rows import Row
from fault_cases.workshop import processor_s

ON_FILES = ("damage", "write_points", "hostile")
"""Of the cases, those that start no ranks."""
CASES = ("kills", "hangs", "stops", "early_stops", "restarts", "storms", "public", *ON_FILES)
"""Modules of `fault_cases`, in the order in which they run."""


def main() -> int:
    """Run the campaign; returns 1 if anything came out as it must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of each kind")
    parser.add_argument("--only", default="", help="names of kinds, with commas between")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    chosen = [name for name in CASES if name in options.only.split(",") or not options.only]
    chosen = [name for name in chosen if (Path(__file__).parent / "fault_cases" / f"{name}.py").exists()]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Those that start ranks wait as much as they compute; those on files start none. Side by side they fill two cores.
    beside = None
    if options.quick and not options.only:
        chosen = [name for name in chosen if name not in ON_FILES]
        words = [sys.executable, __file__, "--quick", "--only", ",".join(ON_FILES)]
        beside = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    lines = ["| test | tried | good | detail |", "|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    failed = 0
    for name in chosen:
        begun, used = time.monotonic(), processor_s()
        with tempfile.TemporaryDirectory(prefix="triweave-faults-") as folder:
            rows = importlib.import_module(f"fault_cases.{name}").run(options.quick, Path(folder))
        taken = f"{time.monotonic() - begun:.0f} s, {processor_s() - used:.0f} s of processors"
        rows.append(Row(f"{name} in all", sum(r.tried for r in rows), sum(r.good for r in rows), taken))
        for row in rows:
            failed += row.good < row.tried
            lines.append(spell(row))
            print(lines[-1], flush=True)
    if beside is not None:
        told, _ = beside.communicate()
        lines += told.splitlines()[2:]
        print("\n".join(told.splitlines()[2:]), flush=True)
        failed += beside.returncode != 0
    if options.out:
        words = ["--quick"] * options.quick + [f"--only {options.only}"] * bool(options.only)
        command = " ".join(["python bench/faults.py", *words])
        head = ["# Fault campaign", "", f"`{command}`, torch {torch.__version__}, gloo, {os.cpu_count()} cores.", ""]
        options.out.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return 1 if failed else 0


def spell(row: Row) -> str:
    """A row as a line of a table."""
    detail = " ".join(row.detail.split()).replace("|", "/")
    return f"| {row.test} | {row.tried} | {row.good} | {detail} |"


if __name__ == "__main__":
    sys.exit(main())
