# SPDX-License-Identifier: Apache-2.0
"""AdamW, NAdamW, Lion and SGD for everything that is not a matrix, over lists of tensors.

A `Rule` is a frozen description; its `direction` is a pure function that maps gradients and slots
(the moments a rule keeps) to the direction D of the step and the new slots. The update is then
-lr lr_scale (D + weight_decay W) for every rule. t counts the updates of a leaf from 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from fmuon.base import ConfigurationError
from fmuon.foreach import foreach
from fmuon.momentum import average, debias, look_ahead, per_leaf

Slots: TypeAlias = dict[str, list[Tensor]]
Direction: TypeAlias = Callable[
    [Sequence[Tensor], Slots, Tensor, tuple[Tensor, Tensor], Tensor], tuple[list[Tensor], Slots]
]


@dataclass(frozen=True)
class Rule:
    """How the leaves that are no matrices are trained.

    Attributes:
        name: shown by `explain`.
        slots: names of the moments kept per leaf, each of the leaf's shape.
        direction: (grads, slots, t, (beta1, beta2), eps) -> (directions, new slots). t and the
            betas are float64, 0-d or one entry per leaf; eps likewise.
        betas: decays of the first and the second moment.
        eps: added to the root of the second moment.
        lr_scale: ratio of this rule's learning rate to that of the matrices.
        weight_decay: None inherits the weight decay of `muon`.
    """

    name: str
    slots: tuple[str, ...]
    direction: Direction
    betas: tuple[float, float]
    eps: float
    lr_scale: float
    weight_decay: float | None

    def __post_init__(self) -> None:
        # A list would make the rule unhashable.
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigurationError(
                f"{self.name}: betas={self.betas} must be two numbers in [0, 1)"
            )
        for option in ("eps", "lr_scale", "weight_decay"):
            value: Any = getattr(self, option)
            if value is not None and not value >= 0:
                raise ConfigurationError(f"{self.name}: {option}={value} must not be negative")

    def __str__(self) -> str:
        """The name of the rule."""
        return self.name


def adamw(
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
) -> Rule:
    """AdamW: D = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    [Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2]
    """
    return Rule("adamw", ("mu", "nu"), _adam, betas, eps, lr_scale, weight_decay)


def nadamw(
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
) -> Rule:
    """AdamW with the Nesterov look-ahead of `fmuon.momentum` in place of m / (1 - b1^t).

    [Dozat 2016, algorithm 2, with constant b1]
    """
    return Rule("nadamw", ("mu", "nu"), _nadam, betas, eps, lr_scale, weight_decay)


def lion(
    betas: tuple[float, float] = (0.9, 0.99),
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
) -> Rule:
    """Lion: D = sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g.

    [Chen et al. 2023, arXiv 2302.06675, algorithm 2]
    """
    return Rule("lion", ("mu",), _lion, betas, 0.0, lr_scale, weight_decay)


def sgd(momentum: float = 0.0, lr_scale: float = 1.0, weight_decay: float | None = None) -> Rule:
    """Gradient descent with heavy-ball momentum as torch.optim.SGD has it: D = m <- b m + g.

    [Polyak 1964]
    """
    direction, slots = (_heavy_ball, ("mu",)) if momentum else (_plain, ())
    return Rule("sgd", slots, direction, (momentum, 0.0), 0.0, lr_scale, weight_decay)


def _adam(
    grads: Sequence[Tensor], slots: Slots, t: Tensor, betas: tuple[Tensor, Tensor], eps: Tensor
) -> tuple[list[Tensor], Slots]:
    return _adam_like(grads, slots, t, betas, eps, nesterov=False)


def _nadam(
    grads: Sequence[Tensor], slots: Slots, t: Tensor, betas: tuple[Tensor, Tensor], eps: Tensor
) -> tuple[list[Tensor], Slots]:
    return _adam_like(grads, slots, t, betas, eps, nesterov=True)


def _adam_like(
    grads: Sequence[Tensor],
    slots: Slots,
    t: Tensor,
    betas: tuple[Tensor, Tensor],
    eps: Tensor,
    *,
    nesterov: bool,
) -> tuple[list[Tensor], Slots]:
    b1, b2 = betas
    mu = average(slots["mu"], grads, per_leaf(1 - b1, grads))
    squares = foreach("mul", grads, grads)
    nu = average(slots["nu"], squares, per_leaf(1 - b2, grads))
    first = look_ahead(mu, grads, b1, t, nesterov=nesterov, bias_correction=True)
    # sqrt(v / d) + eps, with 1 / sqrt(d) as a factor.
    roots = foreach("mul", foreach("sqrt", nu), per_leaf(debias(b2, t).rsqrt(), grads))
    roots = foreach("add", roots, per_leaf(eps, grads))
    return foreach("div", first, roots), {"mu": mu, "nu": nu}


def _lion(
    grads: Sequence[Tensor],
    slots: Slots,
    t: Tensor,  # noqa: ARG001
    betas: tuple[Tensor, Tensor],
    eps: Tensor,  # noqa: ARG001
) -> tuple[list[Tensor], Slots]:
    mixed = average(slots["mu"], grads, per_leaf(1 - betas[0], grads))
    return foreach("sign", mixed), {
        "mu": average(slots["mu"], grads, per_leaf(1 - betas[1], grads))
    }


def _heavy_ball(
    grads: Sequence[Tensor],
    slots: Slots,
    t: Tensor,  # noqa: ARG001
    betas: tuple[Tensor, Tensor],
    eps: Tensor,  # noqa: ARG001
) -> tuple[list[Tensor], Slots]:
    mu = foreach("addcmul", grads, slots["mu"], per_leaf(betas[0], grads))
    return mu, {"mu": mu}


def _plain(
    grads: Sequence[Tensor],
    slots: Slots,  # noqa: ARG001
    t: Tensor,  # noqa: ARG001
    betas: tuple[Tensor, Tensor],  # noqa: ARG001
    eps: Tensor,  # noqa: ARG001
) -> tuple[list[Tensor], Slots]:
    return list(grads), {}
