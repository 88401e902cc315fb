# SPDX-License-Identifier: Apache-2.0
"""AdamW, NAdamW, Lion and SGD for everything that is not a matrix.

A `Rule` is a frozen description; its `direction` is a pure function that maps gradients and slots
(the moments a rule keeps) to the direction D of the step and the new slots. The update is then
-lr lr_scale (D + weight_decay W) for every rule. Tensors and scalars are shaped as in
`fmuon.momentum`: stacks [k, ...] of leaves of one shape, and t counts the updates of a leaf from 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmuon.base import (
    ConfigurationError,
    Scalar,
    check_flag,
    check_floating,
    check_number,
    is_number,
)
from fmuon.momentum import average, debias, look_ahead, root
from fmuon.scalars import check_scalar

Slots: TypeAlias = dict[str, Tensor]
Betas: TypeAlias = tuple[Tensor, Tensor]
Direction: TypeAlias = Callable[
    ["Rule", Tensor, Slots, Tensor, Betas, Tensor], tuple[Tensor, Slots]
]


@dataclass(frozen=True)
class Rule:
    """How the leaves that are no matrices are trained.

    Attributes:
        name: shown by `explain`.
        slots: names of the moments kept per leaf, each of the leaf's shape.
        direction: (rule, grad, slots, t, (beta1, beta2), eps) -> (direction, new slots).
        betas: decays of the first and the second moment.
        eps: added to the root of the second moment.
        lr_scale: ratio of this rule's learning rate to that of the matrices.
        weight_decay: None inherits the weight decay of `muon`.
        lr: a learning rate of its own; None is that of the matrices times `lr_scale`.
        eps_root: added under the root of the second moment.
        mu_dtype: of the first moment; None is float32, or float64 for float64 leaves.
        eps_first: whether eps is added before the bias correction of the second moment.
    """

    name: str
    slots: tuple[str, ...]
    direction: Direction
    betas: tuple[float, float]
    eps: float
    lr_scale: float
    weight_decay: float | None
    lr: Scalar | None = None
    eps_root: float = 0.0
    mu_dtype: torch.dtype | None = None
    eps_first: bool = False

    def __post_init__(self) -> None:
        # A list would make the rule unhashable.
        if isinstance(self.betas, list):
            object.__setattr__(self, "betas", tuple(self.betas))
        if (
            not isinstance(self.betas, tuple)  # pyright: ignore[reportUnnecessaryIsInstance]
            or len(self.betas) != 2
            or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        ):
            raise ConfigurationError(
                f"{self.name}: betas={self.betas} must be two numbers in [0, 1)"
            )
        if isinstance(self.lr, Mapping):
            raise ConfigurationError(
                f"{self.name}: lr={self.lr!r}; give a number, a 0-d tensor or a callable of the "
                f"step (values for single leaves are given to update)"
            )
        if self.lr is not None:
            check_scalar(f"{self.name}: lr", self.lr)
            if self.lr_scale != 1:
                raise ConfigurationError(f"{self.name}: give lr or lr_scale, not both")
        if self.mu_dtype is not None:
            check_floating(f"{self.name}: mu_dtype", self.mu_dtype)
        check_flag(f"{self.name}: eps_first", self.eps_first)
        for option in ("eps", "eps_root", "lr_scale", "weight_decay"):
            value: Any = getattr(self, option)
            if value is not None or option != "weight_decay":
                check_number(f"{self.name}: {option}", value)

    def __str__(self) -> str:
        """The name of the rule."""
        return self.name


def adamw(
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
    *,
    lr: Scalar | None = None,
    eps_root: float = 0.0,
    mu_dtype: torch.dtype | None = None,
    eps_first: bool = False,
) -> Rule:
    """AdamW: D = m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps).

    [Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2]

    With `eps_first` the divisor is (sqrt(v) + eps) / sqrt(1 - b2^t)
    [Kingma and Ba 2015, arXiv 1412.6980, section 2, the order of computation at its end].
    """
    slots = ("mu", "nu")
    return Rule(
        "adamw", slots, _adam, betas, eps, lr_scale, weight_decay, lr, eps_root, mu_dtype, eps_first
    )


def nadamw(
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
    *,
    lr: Scalar | None = None,
    eps_root: float = 0.0,
    mu_dtype: torch.dtype | None = None,
) -> Rule:
    """AdamW with the Nesterov look-ahead of `fmuon.momentum` in place of m / (1 - b1^t).

    [Dozat 2016, algorithm 2, with constant b1]
    """
    return Rule(
        "nadamw", ("mu", "nu"), _nadam, betas, eps, lr_scale, weight_decay, lr, eps_root, mu_dtype
    )


def lion(
    betas: tuple[float, float] = (0.9, 0.99),
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
    *,
    lr: Scalar | None = None,
    mu_dtype: torch.dtype | None = None,
) -> Rule:
    """Lion: D = sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g.

    [Chen et al. 2023, arXiv 2302.06675, algorithm 2]
    """
    return Rule("lion", ("mu",), _lion, betas, 0.0, lr_scale, weight_decay, lr, 0.0, mu_dtype)


def sgd(
    momentum: float = 0.0,
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
    *,
    lr: Scalar | None = None,
) -> Rule:
    """Gradient descent with heavy-ball momentum as torch.optim.SGD has it: D = m <- b m + g.

    [Polyak 1964]
    """
    check_number("sgd: momentum", momentum, below=1)
    direction, slots = (_heavy_ball, ("mu",)) if momentum else (_plain, ())
    return Rule("sgd", slots, direction, (momentum, 0.0), 0.0, lr_scale, weight_decay, lr)


def _adam(
    rule: Rule,
    grad: Tensor,
    slots: Slots,
    t: Tensor,
    betas: Betas,
    eps: Tensor,
    *,
    nesterov: bool = False,
) -> tuple[Tensor, Slots]:
    b1, b2 = betas
    mu = average(slots["mu"], grad, b1)
    nu = average(slots["nu"], grad * grad, b2)
    first = look_ahead(mu, grad, b1, t, nesterov=nesterov, bias_correction=True)
    if rule.eps_first:
        eps = eps / debias(b2, t).sqrt()
    denominator = root(nu / debias(b2, t).to(nu.dtype) + rule.eps_root) + eps.to(nu.dtype)
    return first / denominator, {"mu": mu, "nu": nu}


def _nadam(
    rule: Rule, grad: Tensor, slots: Slots, t: Tensor, betas: Betas, eps: Tensor
) -> tuple[Tensor, Slots]:
    return _adam(rule, grad, slots, t, betas, eps, nesterov=True)


def _lion(
    rule: Rule,  # noqa: ARG001
    grad: Tensor,
    slots: Slots,
    t: Tensor,  # noqa: ARG001
    betas: Betas,
    eps: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Slots]:
    direction = average(slots["mu"], grad, betas[0]).sign()
    return direction, {"mu": average(slots["mu"], grad, betas[1])}


def _heavy_ball(
    rule: Rule,  # noqa: ARG001
    grad: Tensor,
    slots: Slots,
    t: Tensor,  # noqa: ARG001
    betas: Betas,
    eps: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Slots]:
    mu = torch.addcmul(grad, slots["mu"], betas[0].to(grad.dtype))
    return mu, {"mu": mu}


def _plain(
    rule: Rule,  # noqa: ARG001
    grad: Tensor,
    slots: Slots,  # noqa: ARG001
    t: Tensor,  # noqa: ARG001
    betas: Betas,  # noqa: ARG001
    eps: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Slots]:
    return grad, {}
