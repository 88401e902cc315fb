# SPDX-License-Identifier: Apache-2.0
"""Products whose result is symmetric, of which only the lower part is computed where that pays.

On a GPU a Triton kernel leaves out the tiles above the diagonal (see `takes_kernel`). Elsewhere
`product` and `baddbmm` are the plain products, and `gram` and `sum_of_grams` multiply by blocks.
"""

import importlib.util
from collections.abc import Sequence

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


def gram(x: Stack) -> Stack:
    """X X^T of every matrix of a stack: [k, m, n] -> [k, m, m]."""
    if takes_kernel(x):
        return lower_tiles(x, x.mT)
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
