# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average, Nesterov look-ahead and bias correction.

M is the momentum, G the gradient, b the decay of the average and t the number of updates including
this one. Tensors of leaves are stacks [k, ...]; scalars are float64, 0-d or one entry per member of
the stack, shaped [k, 1, ...] to broadcast. All functions are pure.
"""

import torch
from torch import Tensor


def debias(b: Tensor, t: Tensor) -> Tensor:
    """1 - b^t in double precision, without the cancellation of the literal formula.

    [Kingma and Ba 2015, arXiv 1412.6980, section 3]
    """
    return -torch.expm1(t * torch.log(b))


def average(moment: Tensor, grad: Tensor, b: Tensor) -> Tensor:
    """M' = M + (1 - b) (G - M).

    [Kingma and Ba 2015, arXiv 1412.6980, algorithm 1]
    """
    return torch.lerp(moment, grad, (1 - b).to(moment.dtype))


def look_ahead(
    moment: Tensor,
    grad: Tensor,
    b: Tensor,
    t: Tensor,
    *,
    nesterov: bool,
    bias_correction: bool,
) -> Tensor:
    """The estimate of the gradient to act on, from the average M' that already holds G.

    nesterov: U = b M' / (1 - b^(t+1)) + (1 - b) G / (1 - b^t); plain: U = M' / (1 - b^t); without
    bias correction the same without denominators. [Dozat 2016, Incorporating Nesterov momentum into
    Adam, algorithm 2, with constant b]
    """
    if not nesterov:
        return moment / debias(b, t).to(moment.dtype) if bias_correction else moment
    if not bias_correction:
        return torch.lerp(grad, moment, b.to(moment.dtype))
    of_average = (b / debias(b, t + 1)).to(moment.dtype)
    of_gradient = ((1 - b) / debias(b, t)).to(moment.dtype)
    return torch.addcmul(moment * of_average, grad, of_gradient)


def root(x: Tensor) -> Tensor:
    """The root, with derivative 0 at 0: an unused unit must not make meta-gradients NaN."""
    if not torch.is_grad_enabled():
        return x.sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)
