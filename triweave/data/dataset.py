"""Packed sequences on disk: flat arrays that every process maps into memory, never a pickle.

| file                  | holds                                                                              |
|-----------------------|------------------------------------------------------------------------------------|
| `tokens.npy`          | int32 [tokens]: the documents one after the other, in the order of the sequences   |
| `trained.npy`         | bool [tokens]: whether predicting this token counts; never at a document's first   |
| `document_starts.npy` | int64 [documents + 1]: where each document begins in the two above                 |
| `sequence_starts.npy` | int64 [sequences + 1]: the first document of each sequence                         |
| `trained_counts.npy`  | int64 [sequences]: trained tokens of each sequence                                 |
| `examples.npy`        | int64 [documents]: the number of each document in the order in which it was read   |
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from triweave.data.packing import Packing
from triweave.errors import RunFailed

_NAMES = ("tokens", "trained", "document_starts", "sequence_starts", "trained_counts", "examples")


@dataclass(frozen=True, slots=True)
class Dataset:
    """Sequences of at most `seq_len` tokens, mapped from disk. The arrays are described above."""

    seq_len: int
    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    document_starts: npt.NDArray[np.int64]
    sequence_starts: npt.NDArray[np.int64]
    trained_counts: npt.NDArray[np.int64]
    examples: npt.NDArray[np.int64]

    @property
    def num_sequences(self) -> int:
        """Sequences of the data set."""
        return len(self.trained_counts)

    def boundaries(self, sequence: int) -> npt.NDArray[np.int64]:
        """[documents of the sequence + 1]: where its documents begin in `tokens`, and where the last one ends."""
        first, last = self.sequence_starts[sequence], self.sequence_starts[sequence + 1]
        return self.document_starts[first : last + 1]


def count_trained_tokens(dataset: Dataset, ids: Sequence[int]) -> int:
    """Trained tokens of the sequences `ids`: the divisor of a step's loss, known before any token is loaded.

    Negative ids stand for no sequence and count nothing.
    """
    taken = [number for number in ids if number >= 0]
    return int(dataset.trained_counts[taken].sum()) if taken else 0


def write_dataset(
    folder: Path,
    packing: Packing,
    examples: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    trained: npt.NDArray[np.bool_],
) -> str:
    """Write the sequences of `packing` into the new folder `folder`; returns a hash of everything written.

    Args:
        folder: is created.
        packing: at least one sequence; its example numbers are positions in `examples`.
        examples: [examples] which of the source's examples take part.
        starts: [source examples + 1] where each of the source's examples begins in `tokens` and `trained`.
        tokens: [source tokens].
        trained: [source tokens], False at each example's first token.
    """
    folder.mkdir()
    order = examples[np.fromiter((n for sequence in packing.sequences for n in sequence), dtype=np.int64)]
    lengths = starts[order + 1] - starts[order]
    document_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sizes = np.fromiter(map(len, packing.sequences), dtype=np.int64, count=len(packing.sequences))
    sequence_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    flat: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.bool_]] = {"tokens": tokens, "trained": trained}
    for name, source in flat.items():
        shape = (int(document_starts[-1]),)
        target = np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=source.dtype, shape=shape)
        for document, start, length in zip(document_starts, starts[order], lengths, strict=False):
            target[document : document + length] = source[start : start + length]
        target.flush()
    written = np.load(folder / "trained.npy", mmap_mode="r", allow_pickle=False)
    counts = np.add.reduceat(written, document_starts[sequence_starts[:-1]], dtype=np.int64)
    np.save(folder / "document_starts.npy", document_starts, allow_pickle=False)
    np.save(folder / "sequence_starts.npy", sequence_starts, allow_pickle=False)
    np.save(folder / "trained_counts.npy", counts, allow_pickle=False)
    np.save(folder / "examples.npy", order, allow_pickle=False)

    identity = hashlib.sha256()
    for name in _NAMES:
        with (folder / f"{name}.npy").open("rb") as file:
            os.fsync(file.fileno())
            while block := file.read(2**20):
                identity.update(block)
    return identity.hexdigest()


def open_dataset(folder: Path, seq_len: int) -> Dataset:
    """Map the data set in `folder`; nothing is read before it is used.

    Raises:
        RunFailed: a file is missing or damaged, or they do not belong together.
    """
    try:
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _NAMES}
        dataset = Dataset(seq_len, **arrays)
        whole = (
            dataset.document_starts[-1] == len(dataset.tokens) == len(dataset.trained)
            and dataset.sequence_starts[-1] == len(dataset.document_starts) - 1
            and len(dataset.sequence_starts) == dataset.num_sequences + 1
        )
    except (OSError, ValueError, EOFError, IndexError) as error:
        raise RunFailed(f"{folder} holds damaged data ({error}); delete it and it is made again") from None
    if not whole:
        raise RunFailed(f"{folder} holds files of different data sets; delete it and it is made again")
    return dataset
