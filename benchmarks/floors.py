# SPDX-License-Identifier: Apache-2.0
"""What the machine allows: the rate of its matrix products, and how many a method needs.

Both are measured in the round robin of the optimizers, so that a ratio to a floor is as fair as one
between optimizers.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from inventories import Shape
from torch import Tensor

SIDE = 1024
"""Side of the square product whose rate is called that of the machine."""


def newton_schulz_flops(shapes: Sequence[Shape], steps: int = 5) -> int:
    """Per step of an m x n matrix, m <= n: X X^T and P X cost 4 m^2 n, A A costs 2 m^3."""
    sides = [(min(shape), max(shape)) for shape in shapes]
    return sum(steps * (4 * m * m * n + 2 * m**3) for m, n in sides)


def two_product_flops(shapes: Sequence[Shape]) -> int:
    """X X^T and one m x m matrix times X, which every method on the Gram matrix needs: 4 m^2 n."""
    return sum(4 * min(shape) * min(shape) * max(shape) for shape in shapes)


def square_product(dtype: torch.dtype) -> Callable[[], Tensor]:
    """One product of `SIDE` x `SIDE` matrices, 2 SIDE^3 flops."""
    x = torch.randn(SIDE, SIDE).to(dtype)
    out = torch.empty_like(x)
    return lambda: torch.mm(x, x, out=out)


def newton_schulz_products(shapes: Sequence[Shape], dtype: torch.dtype) -> Callable[[], None]:
    """The products of a Newton-Schulz iteration alone, on stacks that lie ready.

    X [k, m, n] is one stack per shape; values are whatever keeps the products finite.
    """
    counts = Counter((min(shape), max(shape)) for shape in shapes)
    stacks = [torch.randn(k, m, n).div(m * n).to(dtype) for (m, n), k in counts.items()]
    grams = [torch.empty(k, m, m, dtype=dtype) for (m, _), k in counts.items()]
    outputs = [torch.empty_like(x) for x in stacks]

    def products() -> None:
        for x, gram, out in zip(stacks, grams, outputs, strict=True):
            for _ in range(5):
                torch.bmm(x, x.mT, out=gram)
                polynomial = gram @ gram
                torch.bmm(polynomial, x, out=out)

    return products
