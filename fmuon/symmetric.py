# SPDX-License-Identifier: Apache-2.0
"""Products whose result is symmetric, of which only the lower part is computed where that pays.

On a GPU a Triton kernel leaves out the tiles above the diagonal (see `takes_kernel`). Elsewhere
`product` and `baddbmm` are the plain products, and `gram` and `sum_of_grams` multiply by blocks.
"""

import importlib.util
from typing import TypeAlias

import torch
from torch import Tensor, library

from fmuon.base import Stack, constant_in_graphs

# Of 128 x 128 tiles this side has one above the diagonal to leave out. A guess: not yet measured.
SMALLEST_SIDE = 256
# Bytes of shared memory per block that a GPU must allow: an A100 has 163 KiB, an H200 227 KiB.
# Consumer GPUs have less than 100 KiB, and the tiles of the kernel take nearly all of that.
_SHARED_MEMORY = 128 * 1024


def product(left: Stack, right: Stack) -> Stack:
    """left right, which the caller knows to be symmetric: [k, m, n], [k, n, m] -> [k, m, m]."""
    return lower_tiles(left, right) if takes_kernel(left, right) else left @ right


def baddbmm(addend: Stack, left: Stack, right: Stack, *, beta: float, alpha: float = 1.0) -> Stack:
    """beta addend + alpha left right, each of the three and the sum symmetric: [k, m, m]."""
    if takes_kernel(addend, left, right):
        return lower_tiles(left, right, addend, beta, alpha)
    return torch.baddbmm(addend, left, right, beta=beta, alpha=alpha)


def takes_kernel(*operands: Stack) -> bool:
    """Whether the kernel computes this product of the operands, the left one among them.

    On a GPU of the data centre with Triton, in 16 bits, from `SMALLEST_SIDE` on; float32, for
    which it has no tensor cores, is left to cuBLAS. The kernel has no derivative and no
    batching rule, so where either may be asked for the product is the plain one.
    """
    first = operands[0]
    return (
        first.device.type == "cuda"
        and first.dtype in (torch.bfloat16, torch.float16)
        and first.shape[-2] >= SMALLEST_SIDE
        and not any(x.requires_grad for x in operands)
        and not is_transformed()
        and has_kernel(first.device)
    )


@constant_in_graphs
def is_transformed() -> bool:
    """Whether a transform of torch.func is at work, or forward differentiation."""
    return (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )


@constant_in_graphs
def has_kernel(device: torch.device) -> bool:
    """Whether Triton is installed and the GPU has room for the tiles."""
    properties = torch.cuda.get_device_properties(device)
    # torch says how much only for NVIDIA's.
    memory: int = getattr(properties, "shared_memory_per_block_optin", 0)
    return importlib.util.find_spec("triton") is not None and memory >= _SHARED_MEMORY


@library.custom_op("fmuon::lower_tiles", mutates_args=())
def lower_tiles(
    left: Tensor, right: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """The product as an operator of its own, which graphs hold as it is."""
    # Imports Triton, which only those have who have a GPU.
    from fmuon import triton_kernels

    return triton_kernels.lower_tiles(left, right, addend, beta, alpha)


@lower_tiles.register_fake
def _(
    left: Tensor, right: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    del right, addend, beta, alpha
    return left.new_empty(left.shape[0], left.shape[1], left.shape[1])


# ---- by blocks -----------------------------------------------------------------------------------

Lower: TypeAlias = list[Tensor]
"""A stack of symmetric or lower triangular matrices: the blocks 11, 21 and 22, or one block."""

# Sides from which a product is split in two block rows: X X^T, and W^T W of a triangle.
_SPLIT_GRAM, _SPLIT_TRIANGLE = 256, 128


def gram(x: Stack) -> Stack:
    """X X^T of every matrix of a stack: [k, m, n] -> [k, m, m]."""
    if takes_kernel(x):
        return lower_tiles(x, x.mT)
    half = x.shape[-2] // 2
    if 2 * half < _SPLIT_GRAM:
        return x @ x.mT
    above, below = x[:, :half], x[:, half:]
    return symmetric_whole([above @ above.mT, below @ above.mT, below @ below.mT])


def lower_gram(x: Stack, half: int) -> Lower:
    """X X^T in lower blocks, cut after so many rows; 0 for one block."""
    if not half or x.shape[-2] < _SPLIT_GRAM:
        return lower_blocks(gram(x), half)
    above, below = x[:, :half], x[:, half:]
    return [gram(above), below @ above.mT, gram(below)]


def sum_of_grams(factors: Stack) -> Stack:
    """sum_j W_j^T W_j of lower triangular factors: [k, poles, m, m] -> [k, m, m]."""
    half = factors.shape[-1] // 2
    if 2 * half < _SPLIT_TRIANGLE:
        return _over_poles(factors, factors)
    _, corner, second = lower_blocks(factors, half)
    rows = factors[..., :half]
    return symmetric_whole(
        [_over_poles(rows, rows), _over_poles(second, corner), _over_poles(second, second)]
    )


def lower_sum_of_grams(factors: Lower) -> Lower:
    """The same of factors in lower blocks, [k, poles, m, m] each, and in lower blocks."""
    if len(factors) == 1:
        return [sum_of_grams(factors[0])]
    first, corner, second = factors
    # Poles below each other: their sum is part of the product.
    rows = corner.flatten(1, 2)
    return [
        sum_of_grams(first) + gram(rows.mT),
        second.flatten(1, 2).mT @ rows,
        sum_of_grams(second),
    ]


def _over_poles(left: Stack, right: Stack) -> Stack:
    """sum_j A_j^T B_j: [k, poles, m, a], [k, poles, m, b] -> [k, a, b], without a copy of views."""
    total = left[:, 0].mT @ right[:, 0]
    for pole in range(1, left.shape[1]):
        total = torch.baddbmm(total, left[:, pole].mT, right[:, pole])
    return total


def lower_blocks(whole: Tensor, half: int) -> Lower:
    """Views of the blocks of matrices [..., m, m] that are cut after so many rows; 0 for one."""
    if not half:
        return [whole]
    above, below = slice(half), slice(half, None)
    return [whole[..., above, above], whole[..., below, above], whole[..., below, below]]


def on_diagonal(blocks: Lower) -> Lower:
    """The blocks that hold the diagonal."""
    return blocks[::2]


def frobenius_of_lower(blocks: Lower) -> Tensor:
    """|A|_F of symmetric matrices, [k, 1, 1]."""
    squares = [torch.linalg.vector_norm(b, dim=(-2, -1), keepdim=True).square() for b in blocks]
    return (squares[0] if len(squares) == 1 else squares[0] + 2 * squares[1] + squares[2]).sqrt()


def symmetric_whole(blocks: Lower) -> Stack:
    """The symmetric matrices whose lower blocks are given: [k, m, m]."""
    if len(blocks) == 1:
        return blocks[0]
    above, beside, below = blocks
    if not writes_blocks(beside):
        return torch.cat([torch.cat([above, beside.mT], -1), torch.cat([beside, below], -1)], -2)
    half, side = above.shape[-1], above.shape[-1] + below.shape[-1]
    whole = above.new_empty(above.shape[0], side, side)
    for place, block in zip(lower_blocks(whole, half), blocks, strict=True):
        place.copy_(block)
    whole[:, :half, half:] = beside.mT
    return whole


def writes_blocks(x: Tensor) -> bool:
    """Whether results are written block by block: not in a graph, nor where a derivative is asked.

    There they are concatenated, which inductor makes one loop of, and eager mode several copies.
    """
    return not (torch.compiler.is_compiling() or x.requires_grad)
