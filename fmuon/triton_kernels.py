# SPDX-License-Identifier: Apache-2.0
"""Triton kernels. Importing this module needs Triton, so it is left to the call that uses one."""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# Side of a tile of the result, and bytes of a row of the tiles that are multiplied: with three
# stages they take 96 KiB of shared memory.
TILE = 128
DEPTH_BYTES = 128


def lower_tiles(
    left: Tensor, right: Tensor, addend: Tensor | None, beta: float, alpha: float
) -> Tensor:
    """beta addend + alpha left right, known to be symmetric: [k, m, n], [k, n, m] -> [k, m, m].

    Entries on and below the diagonal are computed, in float32, rounded once and written to both of
    their places: about half the flops of the whole product, and exact symmetry. The operands may
    have any strides, and one dtype: bfloat16, float16 or float32.
    """
    stack, side, inner = left.shape
    result = left.new_empty(stack, side, side)
    tiles = triton.cdiv(side, TILE)
    with torch.cuda.device_of(left):
        _lower_tiles[(stack * tiles * tiles,)](
            left, right, addend, result, side, inner, beta, alpha,
            *left.stride(), *right.stride(), *_strides(addend),
            TILE=TILE,
            DEPTH=DEPTH_BYTES // left.element_size(),
            # Triton's interpreter takes the bits of bfloat16 for integers.
            WIDEN=left.device.type == "cpu" and left.dtype == torch.bfloat16,
            num_warps=8,
            num_stages=3,
        )  # fmt: skip
    return result


def _strides(addend: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if addend is None else addend.stride()


@triton.jit
def _lower_tiles(
    left, right, addend, result, side, inner, beta, alpha,
    left_matrix, left_row, left_column,
    right_matrix, right_row, right_column,
    addend_matrix, addend_row, addend_column,
    TILE: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program per tile of the result; those above the diagonal have nothing to do."""
    program = tl.program_id(0)
    tiles = tl.cdiv(side, TILE)
    row = (program // tiles) % tiles
    column = program % tiles
    if column > row:
        return
    # Offsets of a stack or a large matrix can pass 2^31; those within a tile don't.
    matrix = (program // (tiles * tiles)).to(tl.int64)
    rows = (row * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (column * TILE + tl.arange(0, TILE)).to(tl.int64)
    depth = tl.arange(0, DEPTH)

    # Rows beyond the side are some other row of the matrix: they are not stored.
    lefts = left + matrix * left_matrix + (rows % side)[:, None] * left_row
    lefts += depth[None, :] * left_column
    rights = right + matrix * right_matrix + (columns % side)[None, :] * right_column
    rights += depth[:, None] * right_row
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, inner, DEPTH):
        a = tl.load(lefts, mask=depth[None, :] < inner - start, other=0.0)
        b = tl.load(rights, mask=depth[:, None] < inner - start, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        lefts += DEPTH * left_column
        rights += DEPTH * right_row
    total *= alpha

    rows, columns = rows[:, None], columns[None, :]
    inside = (rows < side) & (columns <= rows)
    if addend is not None:
        places = addend + matrix * addend_matrix + rows * addend_row + columns * addend_column
        total += beta * tl.load(places, mask=inside, other=0.0).to(tl.float32)
    entries = total.to(result.dtype.element_ty)
    result += matrix * side * side
    tl.store(result + rows * side + columns, entries, mask=inside)
    tl.store(result + columns * side + rows, entries, mask=inside)
