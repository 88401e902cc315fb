# SPDX-License-Identifier: Apache-2.0
"""The methods by name, and the choice of one by what it costs.

`Auto` knows of every method how many flops its products have and what comes on top of them, in
flops of large float32 products. The constants are those of a CPU, fitted to measurements by
benchmarks/orthogonalize.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmuon.base import ConfigurationError, constant_in_graphs, lookup
from fmuon.orthogonalize import GramNewtonSchulz, NewtonSchulz, Orthogonalizer, PolarSVD, Work
from fmuon.zolotarev import Zolotarev

# Fitted to a CPU: the side at which products run at half the rate of large ones; flops in whose
# time a base case of `inverse_factors` is done, and in whose time an operation on a stack starts.
HALF_RATE = 6.7
BASE_CASE = 1.74e6
OPERATION = 1.69e6
# How much cheaper a method with base cases must seem: the fit is off by as much.
MARGIN = 1.15

Choices: TypeAlias = dict[str, tuple[Any, ...]]
"""Methods of one quality by the dtype of their products."""


def _choices(coefficients: str, poles: int) -> Choices:
    choices: Choices = {}
    for dtype in ("auto", "float32", "float64"):
        forms = NewtonSchulz(coefficients, dtype=dtype), GramNewtonSchulz(coefficients, dtype=dtype)
        # Where the dtype is open the device isn't a CPU, and factorisations are slow.
        choices[dtype] = forms if dtype == "auto" else (*forms, Zolotarev(poles))
    return choices


# Quality -> what meets it.
QUALITIES: dict[str, Callable[[], Choices]] = {
    "ns5": functools.cache(lambda: _choices("jordan", poles=2)),
    "high": functools.cache(lambda: _choices("polar_express", poles=3)),
    "exact": lambda: dict.fromkeys(("auto", "float32", "float64"), (PolarSVD(),)),
}


@dataclass(frozen=True)
class Auto:
    """The cheapest method of a quality, for each shape of matrix.

    On a CPU products are in float32 (float64 for float64 input), also where it multiplies bfloat16
    natively: what needs a few products in float32 is faster than what needs many in bfloat16. On
    other devices factorisations are slow, and the choice is between the forms of Newton-Schulz with
    `dtype="auto"`.

    Args:
        quality: "ns5" is no further from the polar factor than five quintic steps, "high" than five
            of Polar Express; "exact" is the factor itself.

    The choice depends on the shape and the number of the matrices of a step, their dtype and their
    device; `explain` shows it. The number is that of all matrices of the shape, so that neither
    `max_stack_bytes` nor a mesh changes it, but for stacks whose stack axis is sharded: of those
    every rank counts its own.
    """

    quality: str = "ns5"
    methods: Choices = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        make = lookup(QUALITIES, self.quality, "quality")
        object.__setattr__(self, "methods", make())

    def __call__(self, x: Tensor, /) -> Tensor:
        """Orthogonalise the trailing two axes of x, [..., m, n] -> [..., m, n], dtype kept."""
        short, long = sorted(x.shape[-2:])
        stack = math.prod(x.shape[:-2])
        return self.choose(stack, short, long, x.dtype, x.device)(x)

    def choose(
        self, stack: int, short: int, long: int, dtype: torch.dtype, device: torch.device
    ) -> Orthogonalizer:
        """The method for so many matrices of a shape, short <= long."""
        products = "float64" if dtype == torch.float64 else "float32"
        products = products if device.type == "cpu" else "auto"
        return self.methods[products][_cheapest(self.quality, products, stack, short, long)]

    def work(self, short: int, long: int) -> Work:
        """That of the method with the fewest flops."""
        return min(method.work(short, long) for method in self.methods["float32"])

    def __str__(self) -> str:
        """`auto(ns5)`."""
        return f"auto({self.quality})"


@constant_in_graphs
def _cheapest(quality: str, products: str, stack: int, short: int, long: int) -> int:
    """The place of the method in the choices of a quality, which a trace can't be handed."""
    return _place(quality, products, stack, short, long)


@functools.cache
def _place(quality: str, products: str, stack: int, short: int, long: int) -> int:
    methods = QUALITIES[quality]()[products]
    costs = [
        cost(method, stack, short, long) * (MARGIN if method.work(short, long).base_cases else 1)
        for method in methods
    ]
    return costs.index(min(costs))


def cost(method: Any, stack: int, short: int, long: int) -> float:
    """Flops of large float32 products in whose time a CPU does one matrix of a stack."""
    work: Work = method.work(short, long)
    products = work.flops * (1 + HALF_RATE / max(1, short))
    return products + work.base_cases * BASE_CASE + work.operations * OPERATION / max(1, stack)


METHODS: dict[str, Callable[[], Orthogonalizer]] = {
    "newton_schulz": NewtonSchulz,
    "gram_newton_schulz": GramNewtonSchulz,
    "zolotarev": Zolotarev,
    "polar_svd": PolarSVD,
    "auto": Auto,
}


def orthogonalizer(method: Any) -> Orthogonalizer:
    """The method of that name with its defaults; a callable passes through."""
    if isinstance(method, str):
        return lookup(METHODS, method, "orthogonalize")()
    if not callable(method):
        raise ConfigurationError(
            f"orthogonalize={method!r}: give a callable [..., m, n] -> [..., m, n] or one of "
            f"{', '.join(map(repr, METHODS))}"
        )
    return method


def chosen(
    method: Any, total: int, short: int, long: int, dtype: torch.dtype, device: torch.device
) -> Orthogonalizer:
    """What a method chooses for all matrices of a shape; itself, where it leaves no choice."""
    if not hasattr(method, "choose"):
        return method
    return method.choose(total, short, long, dtype, device)


def flops_of(method: Orthogonalizer) -> Callable[[int, int], float]:
    """(short, long) -> flops of a method; those of Newton-Schulz where it doesn't say."""
    work = getattr(method, "work", NewtonSchulz().work)
    return lambda short, long: work(short, long).flops
