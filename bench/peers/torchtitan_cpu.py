"""torchtitan on a machine without a GPU, to rehearse a case: it asks CUDA for what gets the CPU here.

Nothing that is measured comes from here: with a GPU this file is not imported.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch


def activate() -> None:
    """Make `torchtitan.train` run over gloo in this process. Call it before the first import of torchtitan."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("triton") is None:
        # Mixture-of-experts kernels: imported with every model, never called by a Llama.
        kernels = types.ModuleType("torchtitan.models.moe.kernels")
        kernels.generate_permute_indices = kernels.fill_indices_wrapper = None  # type: ignore[attr-defined]
        sys.modules[kernels.__name__] = kernels
    # Asked by torchtitan once, as it is imported; without an accelerator it takes CUDA.
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: _Cpu(torch.cpu)
    from torch.distributed.fsdp import FSDPModule

    # torchtitan asks for a factor of 1, which is a reduction that gloo does not have.
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


class _Cpu:
    """`torch.cpu` with the questions about a device's memory that torchtitan asks."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def set_device(self, device: torch.device) -> None:
        """The CPU is one device."""

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object) -> str:
        return "cpu"

    def get_device_properties(self, device: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=1)

    def memory_stats(self, device: object) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        """Nothing is counted."""

    def empty_cache(self) -> None:
        """Nothing is cached."""
