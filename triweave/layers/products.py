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
    seq, batch = gathering.tokens
    y = matrix.new_empty(seq * batch, matrix.shape[1])
    for piece in gathering.pieces:
        x, out = gathering.rows(piece).flatten(0, 1), slices(y, piece, gathering.pieces)
        if bias is None:
            torch.mm(x, matrix, out=out)
        else:
            torch.addmm(bias, x, matrix, out=out)
    return y.view(seq, batch, -1)


def multiply_and_scatter(x: Tensor, matrix: Tensor, transport: Transport) -> Scattering:
    """`x matrix`, a part of a sum over ranks, each piece sent as it is done: it travels while the next is multiplied.

    Args:
        x: `[seq, batch, in]`.
        matrix: `[in, out]`.
        transport: who carries the parts.

    Returns:
        The sum on its way, `[seq/tp, batch, out]`; what is computed before it is finished hides it too.
    """
    seq, batch, features = x.shape
    scattering = transport.scatter((seq, batch), matrix.shape[1], features)
    x = x.flatten(0, 1)
    for piece in scattering.pieces:
        part = torch.mm(slices(x, piece, scattering.pieces), matrix)
        scattering.send(piece, part.view(-1, batch, matrix.shape[1]))
    return scattering


def slices(x: Tensor, piece: range, pieces: tuple[range, ...]) -> Tensor:
    """The rows of one piece in a tensor of the whole sequence."""
    if len(pieces) == 1:
        return x
    size = x.shape[0] // sum(map(len, pieces))
    return x[piece.start * size : piece.stop * size]
