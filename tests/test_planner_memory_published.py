"""Published measurements: real peaks, layouts that ran and did not, and what a row's program does unsaid."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from triweave.cluster import CATALOGUE
from triweave.errors import InputError
from triweave.planner.assumptions import GIB
from triweave.planner.memory import predict_memory
from triweave.planner.memory_replay import fits
from triweave.planner.published_memory import capacity_of, case_of


def row(**columns: object) -> dict[str, str]:
    """A row of published measurements; what is not given is empty."""
    keys = ("source", "model", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq", "gbs", "mbs", "tp", "pp")
    keys += ("vpp", "cp", "dp", "zero", "sp", "precision", "recompute", "peak_mem_gib")
    return {key: str(columns.get(key, "")) for key in keys}


def simumax(tp: int, pp: int, dp: int, measured: float, *, large: bool = False) -> tuple[dict[str, str], float]:
    """A real Megatron-LM run on eight B200, as SimuMax publishes it."""
    shape: dict[str, object] = {"model": "llama3-70b-12L", "layers": 12, "hidden": 8192, "ffn": 28672, "heads": 64}
    if large:
        shape = {"model": "llama3.1-405b-4L", "layers": 4, "hidden": 16384, "ffn": 53248, "heads": 128}
    columns = row(
        source="MooreThreads/SimuMax docs/b200 v1.2 real Megatron run mbc4_cef",
        **shape,
        kv_heads=8,
        vocab=128256,
        seq=4096,
        gbs=4 * dp,
        mbs=1,
        tp=tp,
        pp=pp,
        dp=dp,
        zero=1,
        sp=int(tp > 1),
        recompute="none",
    )
    return columns, measured


SIMUMAX = [
    simumax(1, 2, 4, 66.55),
    simumax(2, 1, 4, 60.68),
    simumax(4, 1, 2, 39.07),
    simumax(8, 1, 1, 28.29),
    simumax(2, 1, 4, 81.59, large=True),
    simumax(8, 1, 1, 38.57, large=True),
]


def peak_gib(columns: dict[str, str], **changes: object) -> float:
    """The largest predicted peak of a row, in GiB."""
    case = case_of(columns)
    stages = predict_memory(
        case.spec,
        case.layout,
        seq_len=case.seq_len,
        num_micro_batches=case.num_micro_batches,
        dtype=case.dtype,
        assumptions=replace(case.assumptions, **changes),  # type: ignore[arg-type]
    )
    return max(stage.peak_allocated_bytes for stage in stages) / GIB


def test_real_megatron_runs() -> None:
    """Six real runs: 0.7 % off on average and 2 % at worst, with nothing fitted to them."""
    errors = [peak_gib(columns) / measured - 1 for columns, measured in SIMUMAX]
    assert mean(map(abs, errors)) <= 0.007
    assert max(map(abs, errors)) <= 0.02


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_gradient_cache": False},
        {"loss": "gathered"},
        {"fused_norm": False},
        {"gradient_bytes": 2},
        {"whole_qkv": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_wrong_assumption_is_seen(changes: dict[str, object]) -> None:
    """Each assumption about Megatron carries weight: turn one around and the same runs are missed."""
    errors = [abs(peak_gib(columns, **changes) / measured - 1) for columns, measured in SIMUMAX]
    assert mean(errors) > 0.007 or max(errors) > 0.02


def aleph_alpha(tp: int, pp: int, mbs: int, dp: int, kernel: str, recompute: str, seq: int = 2048) -> dict[str, str]:
    """A 13B layout of the A100 sweeps of 2311.05610."""
    return row(
        source=f"arXiv2311.05610 Aleph-Alpha raw xlsx kernel={kernel}",
        model="llama-13b-v128k",
        layers=40,
        hidden=5120,
        ffn=13824,
        heads=40,
        kv_heads=40,
        vocab=128000,
        seq=seq,
        gbs=2048,
        mbs=mbs,
        tp=tp,
        pp=pp,
        dp=dp,
        zero=1,
        sp=0,
        recompute=recompute,
    )


@pytest.mark.parametrize(
    ("columns", "ran"),
    [
        (aleph_alpha(1, 1, 1, 64, "flash_attention2+RMSkernel", "none"), True),
        (aleph_alpha(1, 1, 2, 64, "flash_attention2+RMSkernel", "none"), False),
        (aleph_alpha(2, 1, 2, 32, "flash_attention2+RMSkernel", "none"), True),
        (aleph_alpha(2, 1, 4, 32, "flash_attention2+RMSkernel", "none"), False),
        (aleph_alpha(1, 2, 1, 32, "fused", "none"), False),
        (aleph_alpha(2, 1, 1, 32, "fused", "none"), True),
        (aleph_alpha(4, 1, 1, 32, "flash_attention2", "none", seq=8192), False),
        (aleph_alpha(4, 1, 1, 32, "flash_attention2+RMSkernel", "none", seq=8192), True),
    ],
)
def test_layouts_that_ran_and_did_not(columns: dict[str, str], ran: bool) -> None:
    """Layouts on both sides of the edge on A100-80GB, by kernel, are told apart."""
    case = case_of(columns)
    assert ran == fits(
        case.spec,
        case.layout,
        seq_len=case.seq_len,
        num_micro_batches=case.num_micro_batches,
        capacity_bytes=CATALOGUE["a100-80gb"].usable_bytes,
        dtype=case.dtype,
        assumptions=case.assumptions,
    )


def test_measured_columns_are_not_read() -> None:
    """The question that a row asks is the same whatever was measured."""
    columns, _ = SIMUMAX[0]
    measured = {
        "peak_mem_gib": "1",
        "step_time_s": "2",
        "mfu": "OOM",
        "tflops_per_gpu": "3",
        "tokens_per_s_per_gpu": "4",
    }
    assert case_of(columns | measured) == case_of(columns)


@pytest.mark.parametrize(("key", "value"), [("hidden", ""), ("source", "an unknown program")])
def test_a_row_that_cannot_be_priced_says_why(key: str, value: str) -> None:
    """A row without a shape, or of a program whose bookkeeping is not known, is refused by name."""
    with pytest.raises(InputError, match="hidden" if key == "hidden" else "bookkeeping is not known"):
        case_of(SIMUMAX[0][0] | {key: value})


LLAMA_8B = {
    "model": "llama3-8b",
    "layers": 32,
    "hidden": 4096,
    "ffn": 14336,
    "heads": 32,
    "kv_heads": 8,
    "vocab": 128256,
}
MPT_350M = {"model": "mpt-350m", "layers": 24, "hidden": 1024, "ffn": 4096, "heads": 16, "kv_heads": 16, "vocab": 50368}
GPT_22B = {"model": "gpt-22b", "layers": 48, "hidden": 6144, "ffn": 24576, "heads": 64, "kv_heads": 64, "vocab": 51200}
RAN = {
    "llm-foundry": (
        row(source="mosaicml/llm-foundry", **MPT_350M, seq=2048, gbs=512, mbs=16, dp=8, zero=3, recompute="none"),
        "A100-SXM-40GB",
        {"loss": "gathered"},
    ),
    "NeMo": (
        row(source="NVIDIA/NeMo 24.07", **LLAMA_8B, seq=8192, gbs=128, mbs=1, cp=2, dp=4, zero="zero1"),
        "H100",
        {"gradient_bytes": 4},
    ),
    "Megatron-LM 2022": (
        row(source="arXiv2205.05198", **GPT_22B, seq=2048, gbs=4, mbs=4, tp=8, zero=0, sp=1, recompute="selective"),
        "A100-SXM-80GB",
        {"attention": "softmax"},
    ),
}


@pytest.mark.parametrize("name", RAN)
def test_what_a_program_does_unsaid_decides(name: str) -> None:
    """A published run fits by what its program does where the row is silent, and would not by another's habit."""
    columns, card, otherwise = RAN[name]
    case, capacity = case_of(columns), capacity_of(card)
    assert capacity is not None
    question: dict[str, Any] = {
        "seq_len": case.seq_len,
        "num_micro_batches": case.num_micro_batches,
        "capacity_bytes": capacity,
        "dtype": case.dtype,
    }
    assert fits(case.spec, case.layout, assumptions=case.assumptions, **question)
    assert not fits(case.spec, case.layout, assumptions=replace(case.assumptions, **otherwise), **question)


def test_an_empty_cell_is_the_programs_habit() -> None:
    """NeMo splits the sequence where tensor parallelism does not say so; a row that says no is believed."""
    columns = row(source="NVIDIA/NeMo", **LLAMA_8B, seq=8192, gbs=128, mbs=1, tp=4, dp=2)
    assert case_of(columns).layout.uses_sequence_parallel
    assert not case_of(columns | {"sp": "0"}).layout.uses_sequence_parallel
    assert not case_of(columns | {"source": "vTrain"}).layout.uses_sequence_parallel
    assert case_of(columns | {"precision": "fp8_cs"}).assumptions.fp8_inputs


def test_a_cards_name_says_its_memory() -> None:
    """A size in the name counts, whatever the catalogue's card of that kind has; an unknown card has none."""
    usual = CATALOGUE["h100-80gb"].usable_bytes
    assert capacity_of("H100-SXM-80GB") == capacity_of("H100") == usual
    assert capacity_of("H100-SXM-96GB-HBM2e-500W") == usual * 96 // 80
    assert capacity_of("A100-SXM-40GB") == CATALOGUE["a100-40gb"].usable_bytes
    assert capacity_of("MI355X") is None
