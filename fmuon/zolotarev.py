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
from fmuon.symmetric import gram, sum_of_grams, writes_blocks

# Rows up to which a matrix is factorised by LAPACK; larger ones by products of their halves.
BASE = 32
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
        r = gram(x)
        # The Schatten-4 norm of X, squared; it bounds the largest singular value.
        norm = torch.linalg.vector_norm(r, dim=(-2, -1), keepdim=True)
        norm = torch.where(norm > 0, norm, 1)
        # With |X|^(1/2) (R / |X| + c I) / a = L L^T and W = L^-1, W^T W has the scale of Q.
        root = norm.sqrt()
        scales = torch.cat([1 / (root * a) for a in f.residues], 1)
        shifted = (r[:, None] * scales[:, :, None]).flatten(0, 1)
        ratios = [c / a for a, c in zip(f.residues, f.shifts, strict=True)]
        shifted.diagonal(0, -2, -1).add_(
            torch.cat([root[:, 0] * ratio for ratio in ratios], -1).view(-1, 1)
        )
        into = torch.zeros_like(shifted) if writes_blocks(shifted) else None
        factors, failed = inverse_factors(shifted, into)
        q = sum_of_grams(factors.unflatten(0, (-1, poles)))
        failed = (failed.view(-1, poles).amax(1) > 0)[:, None, None]
        flag = failed.to(x.dtype)
        cubic, linear = f.cubic - (0.5 + f.cubic) * flag, f.linear + (1.5 - f.linear) * flag
        q = torch.addcmul(q.masked_fill(failed, 0), r, cubic / (norm * root))
        q.diagonal(0, -2, -1).add_((linear / root)[:, 0])
        return q @ x

    def __str__(self) -> str:
        """`zolotarev(2 poles, lower 0.001)`."""
        return f"zolotarev({self.poles} poles, lower {self.lower:g})"


def inverse_factors(z: Stack, into: Stack | None = None) -> tuple[Stack, Tensor]:
    """W = L^-1 of Z = L L^T for positive definite matrices, and where the factorisation failed.

    [k, m, m] -> [k, m, m] and [k], zero where all went well; W is written `into` zeros if there are
    any. By halves,

        W_11 = inverse factor of Z_11,  Y = Z_21 W_11^T,  W_22 = that of Z_22 - Y Y^T,
        W_21 = -W_22 Y W_11

    so that nearly all of it is products. Only triangles are inverted: the same recursion on the
    inverses themselves loses all digits of the small shifts.
    """
    side = z.shape[-1]
    if side <= BASE:
        factor, failed = torch.linalg.cholesky_ex(z)
        identity = torch.eye(side, dtype=z.dtype, device=z.device).expand_as(z)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        return inverse if into is None else into.copy_(inverse), failed
    half = -(-side // 2 // BASE) * BASE
    above, below = slice(half), slice(half, None)
    first, failed = inverse_factors(
        z[:, above, above], None if into is None else into[:, above, above]
    )
    y = z[:, below, above] @ first.mT
    second, failed_too = inverse_factors(
        torch.baddbmm(z[:, below, below], y, y.mT, alpha=-1),
        None if into is None else into[:, below, below],
    )
    corner = second @ (y @ first).neg()
    if into is None:
        zero = z.new_zeros(z.shape[0], half, side - half)
        into = torch.cat([torch.cat([first, zero], -1), torch.cat([corner, second], -1)], -2)
    else:
        into[:, below, above] = corner
    return into, torch.maximum(failed, failed_too)
