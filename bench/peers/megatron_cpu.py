"""Megatron-Core on a machine without a GPU: the wheel, and the patches that let it run over gloo.

    python bench/peers/megatron_cpu.py          # fetches the wheel into .cache/megatron, once

Megatron-Core is used as it ships. All that is replaced is in `_patch_torch` and `_patch_megatron`: where it asks for a
CUDA device it gets the CPU. The arithmetic of its layers, collectives, pipeline schedules and gradient reductions is
untouched, but for the norm, which is torch's RMSNorm in place of Apex's kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import logging
import os
import subprocess
import sys
import types
import typing
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "0.19.2"
WHEEL = f"megatron_core-{VERSION}-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
SHA256 = "8e3e486f13f559450415b9b9dc0ff3331a0bb83dd154553f7f350a75ff9c42b5"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "megatron"
SOURCES = FOLDER / VERSION

# Mixture-of-experts code that imports triton, which has no CPU build, from the package root.
NEEDS_TRITON = frozenset({"megatron.core.transformer.moe.ops.paged_stash"})


def fetch() -> Path:
    """Download and unpack the wheel unless it is there; return the folder to put on `sys.path`.

    The wheel asks for Python 3.12; its Python sources run on 3.11 as well, so it is unpacked, not installed.
    """
    if (SOURCES / "megatron" / "core").is_dir():
        return SOURCES
    FOLDER.mkdir(parents=True, exist_ok=True)
    download = ["download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    platforms = ["--platform", "manylinux_2_28_x86_64", "--dest", str(FOLDER), f"megatron-core=={VERSION}"]
    subprocess.run([sys.executable, "-m", "pip", *download, *platforms], check=True, timeout=300)
    wheel = FOLDER / WHEEL
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{wheel.name}: sha256 is {digest}, expected {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(SOURCES)
    return SOURCES


def activate() -> None:
    """Make `import megatron.core` work in this process, on the CPU. Call it once, before the first import."""
    if not (SOURCES / "megatron" / "core").is_dir():
        raise SystemExit(f"Megatron-Core {VERSION} is not fetched: run `python bench/peers/megatron_cpu.py` first")
    # Read by its tensor-parallel layers, which warn otherwise; it means nothing on a CPU.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    warnings.filterwarnings("ignore", module=r"megatron\.")
    # Collectives that torch has since renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    sys.path.insert(0, str(SOURCES))
    if sys.version_info < (3, 12):
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _StandIn())
    _patch_torch()
    _patch_megatron()


class _Blank(types.ModuleType):
    """A module whose every name is a function that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a blank module for each name in `NEEDS_TRITON`."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in NEEDS_TRITON else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Blank(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def _patch_torch() -> None:
    """Send what names a CUDA device to the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    # Entered for the rest of the process: the schedule allocates its token counter with device="cuda".
    CudaMeansCpu().__enter__()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    # Asked for by the gradient buffers, and used only where CUDA graphs left events.
    torch.cuda.current_stream = lambda *args, **kwargs: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    named = torch.Tensor.type
    # Its optimizers for bf16 take no parameter whose type is not named for CUDA.
    torch.Tensor.type = lambda self, *args, **kwargs: (  # type: ignore[method-assign]
        named(self, *args, **kwargs) if args or kwargs else f"torch.cuda.{named(self).rpartition('.')[2]}"
    )


def _patch_megatron() -> None:
    """Give the CPU what Megatron takes from CUDA's random state, torch.compile and Apex's norm."""
    import torch
    from megatron.core import jit

    # Eager functions: compiling them changes nothing but the start-up time.
    jit.disable_jit_fuser()
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    @contextlib.contextmanager
    def no_fork(self: CudaRNGStatesTracker, name: str = "") -> Iterator[None]:
        yield

    # The tracker guards dropout and initialisation; here dropout is 0 and weights are loaded.
    CudaRNGStatesTracker.fork = no_fork
    # Saved and restored around what is recomputed, for the same dropout.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: None

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
        # The fallback for a machine without Apex refuses sequence parallelism. All that Apex's norm does for it is
        # this mark, by which finalize_model_grads sums the weight's gradient over the tensor-parallel group.
        module = torch.nn.RMSNorm(hidden_size, eps=eps)
        module.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module

    WrappedTorchNorm.__new__ = norm


if __name__ == "__main__":
    print(fetch())
