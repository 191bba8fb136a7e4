"""`triweave check --on-gpu`: ranks measured one after the other on one GPU, and the grid's step put together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from triweave.cluster import GIB, peak_flops_of
from triweave.config.validate import ResolvedRun
from triweave.dryrun.check import capacity_of
from triweave.dryrun.lone_rank import LAUNCH_QUEUE
from triweave.dryrun.memory import enough_micro_batches, rank_memory
from triweave.dryrun.on_gpu import Measured, OutOfMemory, fewer_micro_batches, grid_step, measure_rank, mfu_of
from triweave.errors import InputError, Problem, nearest_number
from triweave.schedule.actions import Kind

FEWEST_MICRO_BATCHES = 8
"""Run of each rank, if it has as many: enough for medians of its actions."""


def device_of(words: str) -> torch.device:
    """The device of `--device`: a CPU build of torch aborts on tensors of a GPU, so that is asked for here.

    Raises:
        InputError: no such device here, or no such word.
    """
    name, _, index = words.partition(":")
    if words == "cpu":
        return torch.device("cpu")
    if name != "cuda" or (index and not re.fullmatch(r"\d{1,18}", index)) or words.endswith(":"):
        raise InputError(
            Problem("--device", words or '""', "must be cuda, cuda:N or cpu", "cuda" if name != "cpu" else "cpu")
        )
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "this machine has none"
        raise InputError(Problem("--device", words, f"needs a GPU that torch can use, and {why}", "cpu"))
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        rule = f"is not one of this machine's {count} GPU{'' if count == 1 else 's'}, numbered from 0"
        raise InputError(Problem("--device", words, rule, f"cuda:{nearest_number(int(index), range(count))}"))
    return torch.device("cuda", int(index or 0))


def answer(
    resolved: ResolvedRun, ranks: Sequence[int], device: torch.device, *, expandable: bool = True
) -> dict[str, Any]:
    """What is measured of each rank beside what the check says of it, and the step of the grid.

    Args:
        resolved: the run.
        ranks: of its grid.
        device: the GPU; a CPU is a rehearsal, with times of the host and no memory to measure.
        expandable: whether the allocator has expandable segments.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # What PYTORCH_ALLOC_CONF says, which torch has read by now.
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    capacity = capacity_of(resolved)
    told, measured = [], []
    for rank in ranks:
        short = fewer_micro_batches(resolved, _micro_batches(resolved, rank))
        expected = rank_memory(short, rank, expandable=expandable, one_gpu=True)
        found = measure_rank(short, rank, device, cap_bytes=capacity)
        stage = resolved.layout.coordinates(rank).pp
        row = {
            "rank": rank,
            "stage": stage,
            "expected_peak_gib": expected.peak_bytes / GIB,
            "expected_reserved_gib": expected.reserved_bytes / GIB,
            "micro_batches_run": short.num_micro_batches,
        }
        if isinstance(found, OutOfMemory):
            told.append({**row, "fits": False, "out_of_memory": found.message, "at": found.at})
        else:
            measured.append(found)
            told.append({**row, "fits": True, **_told(found, resolved, device)})
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": told,
        "fits": all(row["fits"] for row in told),
        "capacity_gib": None if capacity is None else capacity / GIB,
        "grid": _grid(resolved, measured, device) if len(measured) == len(told) else None,
    }


def _micro_batches(resolved: ResolvedRun, rank: int) -> int:
    """As many as meet every moment that the rank meets with all of them, and a legal number for the schedule."""
    layout, count = resolved.layout, resolved.num_micro_batches
    enough = enough_micro_batches(layout, layout.coordinates(rank).pp, count, LAUNCH_QUEUE)
    return -(-max(enough, FEWEST_MICRO_BATCHES) // layout.pp) * layout.pp


def _told(found: Measured, resolved: ResolvedRun, device: torch.device) -> dict[str, Any]:
    peak = peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        "peak_gib": found.peak_allocated / GIB if device.type == "cuda" else None,
        "reserved_gib": found.peak_reserved / GIB if device.type == "cuda" else None,
        "step_s": found.step_s,
        "actions_s": {f"{kind.value}{stage}": seconds for (kind, stage), seconds in found.actions.items()},
        "rest_s": found.rest_s,
        "mfu_causal": mfu_of(resolved, found.actions, peak, causal=True) if peak else None,
        "mfu_full": mfu_of(resolved, found.actions, peak, causal=False) if peak else None,
    }


def _grid(resolved: ResolvedRun, measured: Sequence[Measured], device: torch.device) -> dict[str, Any]:
    """The whole step: the schedule with the measured actions in it, and what the slowest rank does outside of them.

    Where the measured ranks do not speak for every stage, each stage is taken to be as long as theirs on average.
    """
    layout, cluster = resolved.layout, resolved.cluster
    bandwidth = float("inf")
    if cluster is not None:
        apart = layout.tp * layout.cp * layout.dp
        inside = apart < cluster.gpus_per_node and cluster.gpu.nvlink_bandwidth
        bandwidth = cluster.gpu.nvlink_bandwidth if inside else cluster.gpu.nic_bandwidth or bandwidth
    ranks = ", ".join(str(one.rank) for one in measured)
    said = f"the actions of rank{'' if len(measured) == 1 else 's'} {ranks}"
    try:
        timeline = grid_step(resolved, measured, bandwidth)
    except ValueError:
        timeline = grid_step(resolved, [_everywhere(measured, layout.num_stages)], bandwidth)
        said += ", as if every stage took as long"
    step = timeline.total_s + max(one.rest_s for one in measured)
    tokens = resolved.run.train.global_batch * resolved.run.data.seq_len / step / layout.world_size
    peak = peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops = [tokens * resolved.spec.flops_per_token(resolved.run.data.seq_len, causal=c) for c in (True, False)]
    return {
        "step_s": step,
        "tokens_per_s_per_gpu": tokens,
        "bubble": timeline.bubble_of_total,
        "mfu_causal": flops[0] / peak if peak else None,
        "mfu_full": flops[1] / peak if peak else None,
        "from": said,
    }


def _everywhere(measured: Sequence[Measured], num_stages: int) -> Measured:
    kinds = dict.fromkeys(kind for one in measured for kind, _ in one.actions)

    def seconds(kind: Kind) -> float:
        return mean(taken for one in measured for (other, _), taken in one.actions.items() if other is kind)

    return replace(measured[0], actions={(kind, stage): seconds(kind) for kind in kinds for stage in range(num_stages)})


def to_text(told: dict[str, Any], num_micro_batches: int) -> Iterator[str]:
    """The answer for people."""
    for row in told["ranks"]:
        head = f"rank {row['rank']} (stage {row['stage']}) on {told['device']}:"
        expected = f"{row['expected_peak_gib']:.2f} GiB expected"
        if not row["fits"]:
            yield f"{head} OUT OF MEMORY at {row['at']}, {expected}"
            yield f"  {row['out_of_memory']}"
            continue
        if row["peak_gib"] is None:
            yield f"{head} allocated {expected}, not measured on a CPU"
        else:
            off = row["expected_peak_gib"] / row["peak_gib"] - 1
            yield (
                f"{head} allocated {row['peak_gib']:.2f} GiB, {expected} ({off:+.2%}); reserved "
                f"{row['reserved_gib']:.2f}, {row['expected_reserved_gib']:.2f} expected"
            )
        actions = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in row["actions_s"].items())
        mfu = "" if row["mfu_causal"] is None else f"; MFU {row['mfu_causal']:.1%} causal, {row['mfu_full']:.1%} full"
        yield f"  ms an action: {actions}; outside of them {row['rest_s'] * 1e3:.2f}{mfu}"
        if row["micro_batches_run"] < num_micro_batches:
            yield f"  {row['micro_batches_run']} of the {num_micro_batches} micro-batches were run"
    grid = told["grid"]
    if grid is not None:
        mfu = (
            "" if grid["mfu_causal"] is None else f", MFU {grid['mfu_causal']:.1%} causal, {grid['mfu_full']:.1%} full"
        )
        yield (
            f"grid: {grid['step_s']:.3f} s a step, {grid['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU{mfu}, "
            f"bubble {grid['bubble']:.1%}"
        )
        yield f"  from {grid['from']}; waiting for tensor- and data-parallel collectives is not in it"
