# SPDX-License-Identifier: Apache-2.0
"""Products whose result is symmetric, of which only the lower blocks are computed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fmuon.base import Stack


def gram(x: Stack) -> Stack:
    """X X^T of every matrix of a stack: [k, m, n] -> [k, m, m]."""
    side = x.shape[-2]
    starts = _starts(side, 256)
    if len(starts) == 1:
        return x @ x.mT
    stops = [*starts[1:], side]
    return mirrored(
        [x[:, i:j] @ x[:, :j].mT for i, j in zip(starts, stops, strict=True)], starts, side
    )


def sum_of_grams(factors: Stack) -> Stack:
    """sum_j W_j^T W_j of lower triangular factors: [k, poles, m, m] -> [k, m, m]."""
    _, poles, side, _ = factors.shape
    starts = _starts(side, 128)
    if len(starts) == 1:
        rows = factors.flatten(1, 2)
        return rows.mT @ rows
    lower: list[Tensor] = []
    for i, j in zip(starts, [*starts[1:], side], strict=True):
        # Rows above i of these columns are zero.
        pairs = [(factors[:, p, i:, i:j].mT, factors[:, p, i:, :j]) for p in range(poles)]
        total = pairs[0][0] @ pairs[0][1]
        for left, right in pairs[1:]:
            total = torch.baddbmm(total, left, right)
        lower.append(total)
    return mirrored(lower, starts, side)


def mirrored(lower: Sequence[Tensor], starts: Sequence[int], side: int) -> Stack:
    """The symmetric stack whose block rows, up to the diagonal, are given."""
    places = [slice(i, j) for i, j in zip(starts, [*starts[1:], side], strict=True)]
    if not writes_blocks(lower[0]):
        rows = [
            torch.cat([block, *(below[:, :, here].mT for below in lower[row + 1 :])], -1)
            for row, (block, here) in enumerate(zip(lower, places, strict=True))
        ]
        return torch.cat(rows, -2)
    whole = lower[0].new_empty(lower[0].shape[0], side, side)
    for block, here in zip(lower, places, strict=True):
        whole[:, here, : here.stop] = block
        whole[:, : here.start, here] = block[:, :, : here.start].mT
    return whole


def writes_blocks(x: Tensor) -> bool:
    """Whether results are written block by block: not in a graph, nor where a derivative is asked.

    There they are concatenated, which inductor makes one loop of, and eager mode several copies.
    """
    return not (torch.compiler.is_compiling() or x.requires_grad)


def _starts(side: int, smallest: int) -> list[int]:
    """Where the block rows start: one up to `smallest`, then two, and four from twice that on."""
    blocks = 1 if side < smallest else 2 if side < 2 * smallest else 4
    size = -(-side // blocks)
    return list(range(0, side, size))
