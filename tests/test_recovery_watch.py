"""The watch: who hangs, by what the ranks say of themselves, and that it says so in time."""

from __future__ import annotations

import functools
import json
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from triweave.recovery.agreement import check_collectives, check_same, differing_collectives, differing_facts
from triweave.recovery.statement import Collective, Statement, from_json, recorded_collectives, state_now
from triweave.recovery.verdict import describe, judge
from triweave.recovery.watch import Watch, watching
from triweave.schedule.actions import Action, Kind

SUM = Collective(7, "all_reduce", ((4,),), ("Float",), is_done=False)


def waiting(rank: int, **changes: object) -> Statement:
    """A rank that waits in the seventh sum of its group."""
    one = Statement(rank, 10, "step 3, computing", True, ("step.py:1 run: work.wait()",), {"world": SUM})
    return replace(one, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statements", "guilty", "reason"),
    [
        ([waiting(0), waiting(2)], (1,), "does not answer"),
        ([waiting(0), waiting(1, waits=False), waiting(2)], (1,), "waits for no other rank"),
        (
            [waiting(0), waiting(1), waiting(2, collectives={"world": replace(SUM, name="all_gather")})],
            (2,),
            "is in another collective on group world",
        ),
        (
            [waiting(0, collectives={"world": replace(SUM, dtypes=("Int",))}), waiting(1), waiting(2)],
            (0,),
            "is in another collective on group world",
        ),
        (
            [waiting(0), waiting(1, collectives={"world": replace(SUM, sequence=6)}), waiting(2)],
            (1,),
            "has not called collective 7 on group world",
        ),
        ([waiting(0, progress=12), waiting(1, progress=12), waiting(2)], (2,), "is furthest behind"),
        ([waiting(0), waiting(1), waiting(2)], (), "Every rank waits for another"),
    ],
    ids=["silent", "busy", "other operation", "other type", "one too few", "behind", "network"],
)
def test_guilty_rank_is_found(statements: list[Statement], guilty: tuple[int, ...], reason: str) -> None:
    """Each kind of hang has one rank that the others wait for, and the message begins with it."""
    said = {one.rank: one for one in statements}
    verdict = judge(said, 3)
    assert verdict.guilty == guilty
    assert reason in verdict.reason
    first, *rest = describe(verdict, said, 5.0).splitlines()
    assert first.startswith(f"the run hangs: no progress for 5 s. {f'Rank {guilty[0]}: ' if guilty else 'Every'}")
    assert {line.split(":")[0].strip() for line in rest if line.startswith("  rank")} == {
        f"rank {rank}" for rank in said
    }


def test_two_ranks_that_differ_are_both_told() -> None:
    """Of two collectives that do not match nobody knows which was meant."""
    said = {0: waiting(0), 1: waiting(1, collectives={"world": replace(SUM, name="broadcast")})}
    assert judge(said, 2).guilty == (0, 1)


def test_statement_survives_the_store() -> None:
    """What a rank says goes through the store as JSON, and comes back as it was."""
    one = state_now(3, 17, "step 1, saving")
    assert from_json(one.to_json()) == one
    assert from_json(waiting(1).to_json()) == waiting(1)


def alone(limit_s: float, said: list[str]) -> Watch:
    """The watch of a single process, which notes what it would say in place of ending the tests."""

    def leave(message: str) -> None:
        said.append(message)
        watch.end()

    watch = Watch(0, 1, None, leave, step_limit_s=limit_s, other_limit_s=60.0)
    return watch


def test_hang_is_told_with_place_and_line() -> None:
    """A single process that stands still says where within the limit and two seconds."""
    said: list[str] = []
    with watching(alone(0.5, said)) as watch:
        watch.enter("computing", 4)
        watch.mark(Action(Kind.BACKWARD_INPUT, 2, 1))
        deadline = time.monotonic() + 2.5
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said
    assert "step 4, computing, backward input of stage 2, micro-batch 1" in said[0]
    assert "test_recovery_watch.py" in said[0]


def test_progress_and_slow_sections_are_no_hang() -> None:
    """Marks that come in time keep the watch quiet, and a save may take longer than a step."""
    said: list[str] = []
    with watching(alone(0.6, said)) as watch:
        for step in range(8):
            watch.enter("computing", step)
            time.sleep(0.2)
        watch.enter("saving", 8, in_step=False)
        time.sleep(1.5)
    assert not said
    assert not [thread for thread in threading.enumerate() if thread.name == "watch"]


class SilentStore:
    """The store of a rank 0 that was stopped: it has said which process it is, and answers nothing more."""

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper

    def set(self, key: str, value: str, /) -> None:
        """Take what is put at the beginning."""

    def get(self, key: str, /) -> bytes:
        """Who rank 0 is."""
        assert key == "watch/0/process"
        return f"{socket.gethostname()} {self._keeper}".encode()

    def add(self, key: str, amount: int, /) -> int:
        """Give up, as torch does after its time-out."""
        raise RuntimeError(key)

    def check(self, keys: list[str], /) -> bool:
        """Give up."""
        raise RuntimeError(keys)


@pytest.mark.parametrize("stopped", [True, False])
def test_stopped_keeper_of_the_store_is_ended(stopped: bool) -> None:
    """torchrun would wait for a stopped rank 0 for 30 s: who finds it ends it; one that runs is left to torchrun."""
    said: list[str] = []
    with subprocess.Popen(["sleep", "600"]) as keeper:
        try:
            if stopped:
                keeper.send_signal(signal.SIGSTOP)
            watch = Watch(
                *(1, 2, SilentStore(keeper.pid), said.append),
                step_limit_s=0.1,
                other_limit_s=60.0,
                rank_0_keeps_store=True,
            )
            with watching(watch):
                watch.enter("computing", 1)
                deadline = time.monotonic() + 20
                while not said and time.monotonic() < deadline:
                    time.sleep(0.01)
            assert "The store, kept by rank 0, does not answer" in said[0]
            time.sleep(0.2)
            assert keeper.poll() == (-signal.SIGKILL if stopped else None)
        finally:
            keeper.kill()


def test_mark_costs_nothing_to_speak_of() -> None:
    """A mark is below two microseconds even on a busy machine: a step of a thousand actions pays two milliseconds."""
    watch = alone(60.0, [])
    action = Action(Kind.FORWARD, 0, 0)
    best = min(_seconds_of_marks(watch, action) for _ in range(5))
    assert best / 10_000 < 2e-6


def _seconds_of_marks(watch: Watch, action: Action) -> float:
    begin = time.perf_counter()
    for _ in range(10_000):
        watch.mark(action)
    return time.perf_counter() - begin


def test_difference_is_told_by_rank_and_key() -> None:
    """Whatever most ranks hold is taken for right; keys that one rank lacks are told too."""
    facts = [{"seed": "1", "torch": "2.13"}, {"seed": "2", "torch": "2.13"}, {"seed": "1"}]
    assert differing_facts(facts) == [
        "rank 1: seed is 2, and 1 on most ranks",
        "rank 2: torch is missing, and 2.13 on most ranks",
    ]
    assert differing_facts(facts[:1] * 3) == []


def test_collectives_of_different_length_are_no_difference() -> None:
    """Ranks that are at different places, or whose record begins later, are compared where they overlap."""
    calls = {number: replace(SUM, sequence=number) for number in range(5)}
    late = {number: one for number, one in calls.items() if number > 1}
    assert differing_collectives([{"tp": calls}, {"tp": late}, {"dp": calls}]) == []
    wrong = {**late, 3: replace(SUM, sequence=3, dtypes=("Int",))}
    (told,) = differing_collectives([{"tp": calls}, {"tp": calls}, {"tp": wrong}])
    assert told.startswith("rank 2: called all_reduce 3 (Int [4])")


def test_collectives_of_both_recorders_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU run has gloo's control group in one recorder and NCCL's groups in another; two H200 showed the first alone.

    A group that both carry out has two counts, and one that both recorders tell of is taken once.
    """
    both = entry("gloo", 1, "0", "default_pg")
    first = [both, entry("gloo", 2, "2", "undefined")]
    second = [both, entry("nccl", 7, "1", "dp"), entry("nccl", 9, "0", "default_pg"), entry("nccl", 8, "1", "dp")]
    second.append({**entry("nccl", 8, "1", "dp"), "is_p2p": True})
    for name, entries in (("_dump_fr_trace_json", first), ("_dump_nccl_trace_json", second)):
        dump = functools.partial(dump_of, entries)
        monkeypatch.setattr(torch._C._distributed_c10d, name, dump, raising=False)
    found = {group: [one.sequence for one in ones] for group, ones in recorded_collectives().items()}
    assert found == {
        "0 default_pg (gloo)": [1],
        "0 default_pg (nccl)": [9],
        "1 dp (nccl)": [7, 8],
        "2 undefined (gloo)": [2],
    }


def entry(backend: str, sequence: int, *group: str) -> dict[str, object]:
    """A collective as torch's flight recorder writes it."""
    return {
        "collective_seq_id": sequence,
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
        "is_p2p": False,
        "process_group": list(group),
        "profiling_name": f"{backend}:all_reduce",
        "retired": False,
        "state": "started",
    }


def dump_of(entries: list[dict[str, object]], *, includeCollectives: bool, onlyActive: bool) -> str:
    """The recorder's text, which its options leave whole."""
    assert includeCollectives
    assert not onlyActive
    return json.dumps({"entries": entries})


def check_on_rank(rank: int, port_file: Path, plant: str) -> str:
    """Compare facts, then collectives, with a fault on rank 1; returns what was raised."""
    store = dist.distributed_c10d._get_default_store()
    facts = {"optimizer.learning_rate": "0.1" if (rank, plant) == (1, "fact") else "0.2"}
    try:
        check_same(store, rank, 3, facts, 10.0)
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if (rank, plant) == (1, "dtype") else torch.float32))
        # Another one, with another size, that the other ranks call when the comparison is over.
        ahead = dist.all_reduce(torch.ones(9), async_op=True) if (rank, plant) == (1, "ahead") else None
        check_collectives(store, rank, 3, 10.0)
        if ahead is not None:
            ahead.wait()
        elif plant == "ahead":
            dist.all_reduce(torch.ones(9))
    except RuntimeError as error:
        return f"runtime: {error}"
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        ("", ""),
        ("ahead", ""),
        ("fact", "rank 1: optimizer.learning_rate is 0.1, and 0.2 on most ranks"),
        ("dtype", "rank 1: called all_reduce"),
    ],
    ids=["sound", "one collective ahead", "other key", "int32 among float32"],
)
def test_rank_that_does_something_else_is_named_on_all(
    tmp_path: Path, plant: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo sums int32 and float32 to wrong numbers without a word; the comparison names rank and collective."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")  # read where a process makes its first group
    pool = Ranks()
    try:
        for answer in pool.run(3, check_on_rank, tmp_path, plant):
            assert told in answer if told else answer == ""
    finally:
        pool.close()
