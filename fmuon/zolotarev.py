# SPDX-License-Identifier: Apache-2.0
"""The polar factor from a rational function of the Gram matrix, by Cholesky factorisations.

With R = X X^T and f as in `rational`, the singular values s of X become f(s) in

    Q X,  Q = linear I + cubic R + sum_j residues_j (R + shifts_j I)^-1

which costs 4 m^2 n flops for R and Q X and about 2 m^3 for every pole [Nakatsukasa and Freund 2016,
SIAM Review 58(3)]. There is no iteration in which an error could build up.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fmuon.base import ConfigurationError, Stack, is_number
from fmuon.orthogonalize import Work, on_wide_stack, with_unit_entries
from fmuon.rational import Rational, best_rational
from fmuon.symmetric import (
    Lower,
    frobenius_of_lower,
    lower_blocks,
    lower_gram,
    lower_sum_of_grams,
    on_diagonal,
    symmetric_whole,
    writes_blocks,
)

# Rows up to which a matrix is factorised by LAPACK; larger ones by products of their halves.
BASE = 32
# Rows from which square matrices are kept in lower blocks, which saves passes over memory.
IN_BLOCKS = 128
# Smallest shift, |R| being 1, with which no factorisation failed, by the dtype of the products.
_SMALLEST_SHIFT = {torch.float32: 1.5e-6, torch.float64: 3e-15}


@dataclass(frozen=True)
class Zolotarev:
    """A rational function of best approximation in place of an iteration; for CPUs, in float32.

    Singular values from `lower` times the Schatten-4 norm of the matrix up end within an error of 1
    that depends on both options, in a few products where Newton-Schulz needs fifteen. float64 input
    is computed in float64, all other in float32.

    Args:
        poles: shifted inverses; 2 is nearer to the polar factor than five quintic steps, 3 nearer
            than five of Polar Express.
        lower: the smallest singular value, relative to the norm, that is still to end near 1.

    A zero matrix gives exactly zero; NaN or inf makes its own matrix NaN and no other. A matrix
    whose factorisation breaks down, which rounding can't bring about, gets one cubic Newton-Schulz
    step instead.
    """

    poles: int = 2
    lower: float = 1e-3
    function: Rational = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (is_number(self.poles, whole=True) and 1 <= self.poles <= 8):
            raise ConfigurationError(f"poles={self.poles!r}: give 1 to 8")
        if not (is_number(self.lower) and 1e-7 <= self.lower < 1):
            raise ConfigurationError(
                f"lower={self.lower!r}: give a number from 1e-7 to 1, without 1"
            )
        object.__setattr__(self, "function", best_rational(self.poles, self.lower))

    def __call__(self, x: Tensor, /) -> Tensor:
        """Orthogonalise the trailing two axes of x, [..., m, n] -> [..., m, n], dtype kept."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if self.function.shifts[0] < _SMALLEST_SHIFT[dtype]:
            raise ConfigurationError(
                f"{self} has the shift {self.function.shifts[0]:.2g}; in {dtype} factorisations "
                f"may fail below {_SMALLEST_SHIFT[dtype]}: take fewer poles or a larger lower"
            )
        with torch.autocast(x.device.type, enabled=False):
            return on_wide_stack(self._of_wide, x.to(dtype)).to(x.dtype)

    def work(self, short: int, long: int) -> Work:
        """For one matrix of that shape, short <= long."""
        leaves = -(-short // BASE)
        flops = 4 * short**2 * long + 2 * self.poles * short**3
        return Work(flops, operations=20 + 10 * leaves, base_cases=self.poles * leaves)

    def _of_wide(self, x: Stack) -> Stack:
        f, poles = self.function, self.poles
        x = with_unit_entries(x)
        side = x.shape[-2]
        r = lower_gram(x, split(side) if side >= IN_BLOCKS else 0)
        # The Schatten-4 norm of X, squared; it bounds the largest singular value.
        norm = frobenius_of_lower(r)
        norm = torch.where(norm > 0, norm, 1)
        # With |X|^(1/2) (R / |X| + c I) / a = L L^T and W = L^-1, W^T W has the scale of Q.
        root = norm.sqrt()
        scales = torch.cat([1 / (root * a) for a in f.residues], 1)[:, :, None]
        ratios = [c / a for a, c in zip(f.residues, f.shifts, strict=True)]
        shifts = torch.cat([root[:, 0] * ratio for ratio in ratios], -1).view(-1, 1)
        shifted = [(block[:, None] * scales).flatten(0, 1) for block in r]
        for block in on_diagonal(shifted):
            block.diagonal(0, -2, -1).add_(shifts)
        factors, failed = inverse_blocks(shifted)
        failed = (failed.view(-1, poles).amax(1) > 0)[:, None, None]
        flag = failed.to(x.dtype)
        cubic, linear = f.cubic - (0.5 + f.cubic) * flag, f.linear + (1.5 - f.linear) * flag
        sums = lower_sum_of_grams([block.unflatten(0, (-1, poles)) for block in factors])
        cubic = cubic / (norm * root)
        q = [
            torch.addcmul(total.masked_fill(failed, 0), block, cubic)
            for total, block in zip(sums, r, strict=True)
        ]
        for block in on_diagonal(q):
            block.diagonal(0, -2, -1).add_((linear / root)[:, 0])
        return symmetric_whole(q) @ x

    def __str__(self) -> str:
        """`zolotarev(2 poles, lower 0.001)`."""
        return f"zolotarev({self.poles} poles, lower {self.lower:g})"


def split(side: int) -> int:
    """Rows of the upper half of a matrix that is split; 0 where it is small enough as it is."""
    return 0 if side <= BASE else -(-side // 2 // BASE) * BASE


def inverse_factors(z: Stack, into: Stack | None = None) -> tuple[Stack, Tensor]:
    """W = L^-1 of Z = L L^T for positive definite matrices, and where the factorisation failed.

    [k, m, m] -> [k, m, m] and [k], zero where all went well; W is written `into` zeros if there are
    any. Of Z the upper triangle isn't read.
    """
    side, half = z.shape[-1], split(z.shape[-1])
    if not half:
        factor, failed = torch.linalg.cholesky_ex(z)
        identity = torch.eye(side, dtype=z.dtype, device=z.device).expand_as(z)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        return inverse if into is None else into.copy_(inverse), failed
    if into is None and writes_blocks(z):
        into = torch.zeros_like(z)
    blocks, failed = inverse_blocks(
        lower_blocks(z, half), None if into is None else lower_blocks(into, half)
    )
    if into is None:
        first, corner, second = blocks
        zero = z.new_zeros(z.shape[0], half, side - half)
        into = torch.cat([torch.cat([first, zero], -1), torch.cat([corner, second], -1)], -2)
    return into, failed


def inverse_blocks(z: Lower, into: Lower | None = None) -> tuple[Lower, Tensor]:
    """The same for matrices in lower blocks, whose factors W come in lower blocks.

        W_11 = inverse factor of Z_11,  Y = Z_21 W_11^T,  W_22 = that of Z_22 - Y Y^T,
        W_21 = -W_22 Y W_11

    Nearly all of it is products. Only triangles are inverted: the same recursion on the
    inverses themselves loses all digits of the small shifts.
    """
    if len(z) == 1:
        whole, failed = inverse_factors(z[0], None if into is None else into[0])
        return [whole], failed
    above, beside, below = z
    first, failed = inverse_factors(above, None if into is None else into[0])
    y = beside @ first.mT
    second, failed_too = inverse_factors(
        torch.baddbmm(below, y, y.mT, alpha=-1), None if into is None else into[2]
    )
    # beta=0: what is added to isn't read.
    corner = torch.baddbmm(beside, second, y @ first, beta=0, alpha=-1)
    if into is not None:
        into[1].copy_(corner)
    return [first, corner, second], torch.maximum(failed, failed_too)
