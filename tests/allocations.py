"""Memory as it is: every storage that some code makes, and which of them are still alive."""

from __future__ import annotations

import gc
import time
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Every storage that is made inside, and how many bytes they hold now."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[StorageWeakRef] = set()
        self.given: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.given |= _storages((args, kwargs)) - self.made
        result = func(*args, **(kwargs or {}))
        self.made |= _storages(result) - self.given
        return result

    def alive_bytes(self) -> int:
        """Bytes of the storages that somebody still holds; one that was resized counts with its present size."""
        gc.collect()
        alive = (UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.made)
        return sum(storage.nbytes() for storage in alive if storage is not None)


def _storages(values: Any) -> set[StorageWeakRef]:
    return {StorageWeakRef(value.untyped_storage()) for value in tree_leaves(values) if isinstance(value, Tensor)}


def settled(memory: Allocated, planned: int) -> int:
    """Bytes alive. A thread of gloo lets go of a finished collective's tensors a moment after its caller goes on."""
    end = time.monotonic() + 2
    while (alive := memory.alive_bytes()) > planned and time.monotonic() < end:
        time.sleep(0.01)
    return alive
