"""Pieces of a sequence, what they cost and hide, the memory that overlapping takes, and what is chosen where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triweave.collectives import sum_parts
from triweave.groups import Group, alone
from triweave.kernels.partial_sums import sum_in_order
from triweave.overlap import FLAG_BYTES, MIN_PIECE_TOKENS, PIECE_S, exchange_bytes, exposed_s, pays_to_cut, pieces
from triweave.transport.choose import choose_transport

CPU = torch.device("cpu")


@given(tp=st.integers(1, 16), rank=st.integers(0, 15), slice_tokens=st.integers(1, 10_000))
def test_every_slice_is_in_one_piece(tp: int, rank: int, slice_tokens: int) -> None:
    """A rank's own slice comes first and alone, the others' once each from the next rank on."""
    rank %= tp
    own, *others = pieces(tp, rank, slice_tokens)
    assert list(own) == [rank]
    assert [peer for piece in others for peer in piece] == [*range(rank + 1, tp), *range(rank)]


@given(tp=st.integers(2, 16), rank=st.integers(0, 15), slice_tokens=st.integers(1, 10_000))
def test_pieces_are_no_smaller_than_they_must(tp: int, rank: int, slice_tokens: int) -> None:
    """Only the last piece before the end of the sequence, or before the own slice, may be below the least size."""
    rank %= tp
    for piece in pieces(tp, rank, slice_tokens)[1:]:
        small = len(piece) * slice_tokens < MIN_PIECE_TOKENS
        assert not small or piece.stop in (tp, rank)
        assert (len(piece) - 1) * slice_tokens < MIN_PIECE_TOKENS


def test_pieces_of_known_layouts() -> None:
    """Llama-3-8B at TP 2 multiplies two halves; 70B at TP 8 and sequence 4096 takes four ranks' slices together."""
    assert pieces(2, 1, 8192 // 2) == (range(1, 2), range(1))
    assert pieces(8, 3, 4096 // 8) == (range(3, 4), range(4, 8), range(3))


@given(
    tp=st.integers(2, 8),
    slice_tokens=st.integers(1, 8192),
    moved=st.integers(16, 16384),
    other=st.integers(0, 65536),
    num_pieces=st.integers(2, 8),
)
def test_cutting_hides_no_more_than_there_is(
    tp: int, slice_tokens: int, moved: int, other: int, num_pieces: int
) -> None:
    """Pieces win at most the time of the copies and that of the product, and each costs its price."""
    whole, cut = (exposed_s(tp, slice_tokens, moved, other, number) for number in (1, num_pieces))
    price = (num_pieces - 1) * PIECE_S
    product = 2 * tp * slice_tokens * moved * other / 600e12
    slack = 1e-9 * (whole + price)
    assert price - slack <= cut <= whole + price + slack
    assert whole + price - cut <= product * (num_pieces - 1) / num_pieces + slack


def test_products_of_known_sizes_are_cut_or_not() -> None:
    """At TP 2 every product of Llama-3-8B is cut at sequence 4096, and its attention output at 1024 is not."""
    for moved, other in [(4096, 3072), (4096, 2048), (4096, 14336), (4096, 7168)]:
        assert pays_to_cut(2, 4096 // 2, moved, other)
    assert not pays_to_cut(2, 1024 // 2, 4096, 2048)
    assert not pays_to_cut(2, 8192 // 2, 4096, 0), "no product reads the rows in pieces"


@pytest.mark.parametrize("tp", [2, 8])
def test_memory_is_one_activation(tp: int) -> None:
    """What ranks exchange through is as large as one activation of the whole sequence, whatever the ranks."""
    activation = 8192 * 4096 * 2
    assert exchange_bytes(tp, activation // tp) == activation + FLAG_BYTES


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_parts_are_summed_in_float32(ranks: int) -> None:
    """Bfloat16 parts give the exact sum rounded once, and are left as they are."""
    generator = torch.Generator().manual_seed(ranks)
    parts = [torch.randn(1000, generator=generator).bfloat16() for _ in range(ranks)]
    kept = [part.clone() for part in parts]
    exact = torch.stack(parts).double().sum(0)
    # The float32 sum itself may be off by its last bits, which decides a tie of the rounding in rare cases.
    wrong = (sum_parts(parts) != exact.bfloat16()).sum()
    assert wrong <= 2
    assert all(torch.equal(part, former) for part, former in zip(parts, kept, strict=True))
    assert sum_parts(parts).dtype is torch.bfloat16


def test_one_part_is_its_own_sum() -> None:
    """A context-parallel rank may see keys in one part; the kernel always adds three and must not be asked."""
    part = torch.randn(10)
    assert torch.equal(sum_parts([part]), part)
    for number in (1, 2, 9):
        with pytest.raises(ValueError, match=f"{number} parts, 3 to 8"):
            sum_in_order([part] * number)


def test_log_tells_why_nothing_is_overlapped() -> None:
    """Without copy engines, or where a run switches them off, collectives are used and the name says why."""
    group = Group((0, 1), 0)
    assert "no copy engines on cpu" in choose_transport("auto", group, True, CPU, 1).name
    assert "overlap_tp is off" in choose_transport("off", group, True, torch.device("cuda", 0), 1).name
    for nothing_to_do in (
        choose_transport("auto", alone(), True, CPU, 1),
        choose_transport("auto", group, False, CPU, 1),
    ):
        assert "(" not in nothing_to_do.name
