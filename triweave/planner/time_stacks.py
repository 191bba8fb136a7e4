"""Which software stack a published source ran."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from triweave.planner.time_stack import (
    COMPILED,
    EAGER_NORM,
    EAGER_TITAN,
    FSDP_MPT,
    MEGATRON_2021,
    SCALING_RMS,
    TRANSFORMER_ENGINE,
    Rerun,
    Stack,
)

SCALING_FLASH2 = replace(SCALING_RMS, name="scaling flash2", norm=EAGER_NORM, efficiency=0.96)
SCALING_FLASH1 = replace(SCALING_FLASH2, name="scaling flash1", attention="flash1")
SCALING_FUSED = replace(SCALING_FLASH2, name="scaling fused", attention="fused-softmax")
SCALING_TORCH = replace(SCALING_FLASH2, name="scaling torch", attention="unfused")
MEGATRON_CORE = replace(TRANSFORMER_ENGINE, name="megatron-core", pipelined=1.0)
DEEPSPEED = replace(MEGATRON_2021, name="megatron-deepspeed", efficiency=1.0)
DEEPSPEED_ONE_NODE = replace(DEEPSPEED, name="megatron-deepspeed, one node", efficiency=1.08)
MEGATRON_2022 = replace(MEGATRON_2021, name="megatron-2022", efficiency=1.0)
INTERN = replace(
    SCALING_RMS,
    name="internevo",
    split="layers",
    gradient_size=2,
    reduces_whole=False,
    fused_gate=False,
    overlap_dp=0.5,
    efficiency=0.97,
)
TITAN_2024 = replace(COMPILED, name="compiled 2024", attention="flash2")
TITAN_EAGER_2024 = replace(EAGER_TITAN, name="eager 2024", attention="flash2")
NANOTRON = replace(EAGER_TITAN, name="nanotron", attention="flash2", overlap_dp=0.0, overlap_tp=False)


RERUNS = {
    # torchtitan's "op" policy keeps attention and every second product.
    "selective-op": Rerun(matmul=0.5, memory=1.0),
    "selective-layer": Rerun(0.5, 0.5, 0.5),
    # Megatron's: the attention core alone.
    "selective": Rerun(attention=1.0),
    # Five of 32 layers.
    "full_block5": Rerun(5 / 32, 5 / 32, 5 / 32),
}


@lru_cache(maxsize=256)
def stack_of_source(source: str, precision: str, recompute: str) -> Stack:
    """The stack of a row."""
    stack = _stack(source)
    return replace(stack, rerun=RERUNS[recompute]) if recompute in RERUNS else stack


def _stack(source: str) -> Stack:
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
    if "vTrain" in source:
        return DEEPSPEED_ONE_NODE if "ground_truth_single" in source else DEEPSPEED
    if "2205.05198" in source:
        return MEGATRON_2022
    if "2104.04473" in source or "sailor" in source:
        return MEGATRON_2021
    if "InternLM" in source:
        return INTERN
    if "torchtitan" in source or "torchao" in source:
        if "eager" in source:
            return TITAN_EAGER_2024
        if "202412" in source:
            return TITAN_2024
        if "docs/performance" in source:
            return TITAN_EAGER_2024
        return COMPILED
    if "nanotron" in source or "ultrascale" in source:
        return NANOTRON
    if "SimuMax" in source:
        return MEGATRON_CORE
    return TRANSFORMER_ENGINE
