"""Which examples are held out: a share of them, chosen by content and seed, never the tail of the file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def content_hash(input_ids: npt.NDArray[np.int32], seed: int) -> int:
    """64 bits that depend on the tokens and the seed alone, so the same example has the same one wherever it stands."""
    return int.from_bytes(
        hashlib.blake2b(input_ids.astype("<i4").tobytes(), digest_size=8, key=str(seed).encode()).digest(), "big"
    )


def held_out(hashes: Sequence[int], sources: Sequence[int], share: float) -> npt.NDArray[np.bool_]:
    """[examples]: True for the `share` of them that is held out.

    The order of the hashes decides, so adding a row to a file moves few others. Pieces of one document stay on one
    side, unless there are so few documents that the share of them would be less than one. At least one example is
    held out (if `share` is not 0), and at least one stays.
    """
    mask = np.zeros(len(hashes), dtype=np.bool_)
    if share == 0 or len(hashes) < 2:
        return mask
    documents = np.unique(np.asarray(sources, dtype=np.int64), return_inverse=True)[1]
    num_documents = int(documents.max()) + 1
    units = documents if num_documents * share >= 1 else np.arange(len(hashes))
    num_units = int(units.max()) + 1
    if num_units < 2:
        return mask
    # The hash of a document is that of its first piece.
    first = np.unique(units, return_index=True)[1]
    order = np.lexsort((np.arange(num_units), np.asarray(hashes, dtype=np.uint64)[first]))
    count = min(max(1, round(num_units * share)), num_units - 1)
    mask[np.isin(units, order[:count])] = True
    return mask
