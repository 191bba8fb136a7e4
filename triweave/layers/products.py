"""Products in pieces, so that the rows of one travel while another is multiplied. Any `Transport` carries them."""

from __future__ import annotations

import torch
from torch import Tensor

from triweave.transport.interface import Gathering, Scattering, Transport


def multiply_gathered(gathering: Gathering, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x matrix + bias`, each piece as it arrives: it travels while the pieces before it are multiplied.

    Args:
        gathering: `x` on its way, `[seq/tp, batch, in]` from each rank.
        matrix: `[in, out]`.
        bias: `[out]`.

    Returns:
        `[seq, batch, out]`.
    """
    y = matrix.new_empty(*gathering.tokens, matrix.shape[1])
    for piece in gathering.pieces:
        x, out = gathering.rows(piece), slices(y, piece, gathering.pieces)
        if bias is None:
            torch.mm(x.flatten(0, 1), matrix, out=out.flatten(0, 1))
        else:
            torch.addmm(bias, x.flatten(0, 1), matrix, out=out.flatten(0, 1))
    return y


def multiply_and_scatter(x: Tensor, matrix: Tensor, transport: Transport) -> Scattering:
    """`x matrix`, a part of a sum over ranks, each piece sent as it is done: it travels while the next is multiplied.

    Args:
        x: `[seq, batch, in]`.
        matrix: `[in, out]`.
        transport: who carries the parts.

    Returns:
        The sum on its way, `[seq/tp, batch, out]`; what is computed before it is finished hides it too.
    """
    seq, batch, _ = x.shape
    scattering = transport.scatter((seq, batch))
    for piece in scattering.pieces:
        scattering.send(piece, slices(x, piece, scattering.pieces) @ matrix)
    return scattering


def slices(x: Tensor, piece: range, pieces: tuple[range, ...]) -> Tensor:
    """The rows of one piece in a tensor of the whole sequence."""
    size = x.shape[0] // sum(map(len, pieces))
    return x[piece.start * size : piece.stop * size]
