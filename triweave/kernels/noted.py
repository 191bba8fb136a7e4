"""What a kernel finds on its way about the tensor that it makes, left with that tensor for whoever asks later."""

from __future__ import annotations

from torch import Tensor


def note_amax(x: Tensor, parts: Tensor) -> None:
    """Leave with `x` the largest magnitudes of its parts, float32; a cast to fp8 then need not look for them."""
    x.amax_parts = (parts, x._version)  # type: ignore[attr-defined]


def noted_amax(x: Tensor) -> Tensor | None:
    """The largest magnitude of `x`, a float32 scalar, if it was noted and `x` is still what it was."""
    parts, version = getattr(x, "amax_parts", (None, 0))
    # Autograd may add another gradient to one in place: then what was noted is of another tensor.
    if parts is None or version != x._version:
        return None
    amax: Tensor = parts.amax()
    return amax
