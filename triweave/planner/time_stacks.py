"""Which software stack a published source ran."""

from __future__ import annotations

from dataclasses import replace

from triweave.planner.time_stack import (
    COMPILED,
    EAGER_NORM,
    EAGER_TITAN,
    FSDP_MPT,
    MEGATRON_2021,
    SCALING_RMS,
    TRANSFORMER_ENGINE,
    Bytes,
    Stack,
)

SCALING_FLASH2 = replace(SCALING_RMS, name="scaling flash2", norm=EAGER_NORM)
OLD = dict(norm=EAGER_NORM)
SCALING_FLASH1 = replace(SCALING_FLASH2, name="scaling flash1", attention="flash1")
SCALING_FUSED = replace(SCALING_FLASH2, name="scaling fused", attention="fused-softmax")
SCALING_TORCH = replace(SCALING_FLASH2, name="scaling torch", attention="unfused")
INTERN = replace(SCALING_RMS, name="internevo", attention="flash2", split="layers", overlap_dp=0.5)
TITAN_A100 = replace(COMPILED, name="titan a100", attention="flash2", overlap_dp=1.0)
NANOTRON = replace(EAGER_TITAN, name="nanotron", attention="flash2", overlap_dp=0.0, overlap_tp=False)


def stack_of_source(source: str, precision: str, recompute: str) -> Stack:
    """The stack of a row."""
    if "2311.05610" in source:
        kernel = source.split("kernel=")[-1]
        return {
            "flash_attention2+RMSkernel": SCALING_RMS,
            "flash_attention2": SCALING_FLASH2,
            "flash_attentionv1.0.8": SCALING_FLASH1,
            "fused": SCALING_FUSED,
            "torch": SCALING_TORCH,
        }[kernel]
    if "mosaicml" in source:
        return FSDP_MPT
    if "vTrain" in source or "2104.04473" in source or "2205.05198" in source or "sailor" in source:
        return MEGATRON_2021
    if "InternLM" in source:
        return INTERN
    if "torchtitan" in source or "torchao" in source:
        if "eager" in source:
            return EAGER_TITAN
        if "docs/performance" in source:
            return TITAN_A100
        return COMPILED
    if "nanotron" in source or "ultrascale" in source:
        return NANOTRON
    return TRANSFORMER_ENGINE
