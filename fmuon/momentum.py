# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average, Nesterov look-ahead and bias correction, over lists of tensors.

M is the momentum, G the gradient, b the decay of the average (0-d) and t the number of updates of
the leaf including this one. All functions are pure.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fmuon.foreach import foreach


def debias(b: Tensor, t: Tensor) -> Tensor:
    """1 - b^t in double precision, without the cancellation of the literal formula.

    Shapes broadcast. [Kingma and Ba 2015, arXiv 1412.6980, section 3]
    """
    return -torch.expm1(t * torch.log(b))


def average(
    moments: Sequence[Tensor], grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """M' = M + (1 - b) (G - M), with weights 1 - b, each 0-d and of its leaf's dtype."""
    return foreach("lerp", moments, grads, weights)


def look_ahead(
    moments: Sequence[Tensor],
    grads: Sequence[Tensor],
    b: Tensor,
    t: Tensor,
    *,
    nesterov: bool,
    bias_correction: bool,
) -> list[Tensor]:
    """The estimate of the gradient to act on, from the averages M' that already hold G.

    nesterov: U = b M' / (1 - b^(t+1)) + (1 - b) G / (1 - b^t); plain: U = M' / (1 - b^t); without
    bias correction the same without denominators. [Dozat 2016, Incorporating Nesterov momentum into
    Adam, algorithm 2, with constant b]

    Args:
        moments: M', any shapes.
        grads: G, the same shapes.
        b: float64, 0-d or one entry per leaf.
        t: float64, one entry per leaf.
        nesterov: look ahead, or act on the average.
        bias_correction: divide by how far the average has filled up.
    """
    if not nesterov and not bias_correction:
        return list(moments)
    of_average = b if nesterov else torch.ones_like(b)
    of_gradient = 1 - b
    if bias_correction:
        of_average = of_average / debias(b, t + 1 if nesterov else t)
        of_gradient = of_gradient / debias(b, t)
    look = foreach("mul", moments, per_leaf(of_average, moments))
    if nesterov:
        look = foreach("addcmul", look, grads, per_leaf(of_gradient, grads))
    return look


def per_leaf(values: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """One 0-d tensor per leaf, of the leaves' dtype, from a 0-d tensor or one entry per leaf."""
    values = values.to(leaves[0].dtype)
    return [values] * len(leaves) if values.ndim == 0 else list(values.unbind())
