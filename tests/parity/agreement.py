# SPDX-License-Identifier: Apache-2.0
"""Both optimizers over the same 20 steps, and how far apart they end."""

import math
from typing import NamedTuple

import problems
import torch

import fmuon


def run(opt, shapes, *, spectrum="gaussian", schedule=None, dtype=torch.float32, steps=range(20),
        start=None, state=None, eps=None):  # fmt: skip
    """(params, state) after the steps of a transformation, by name; `eps` is a function of the
    step."""
    params = start or tensors(problems.weights(shapes), dtype)
    state = opt.init(params) if state is None else state
    for step in steps:
        grads = tensors(problems.gradients(shapes, step, spectrum), dtype)
        scalars = {} if schedule is None else {"lr": schedule(step)}
        if eps is not None:
            scalars["eps"] = eps(step)
        updates, state = opt.update(grads, state, step, params, **scalars)
        params = fmuon.apply_updates(params, updates)
    return params, state


def run_torch(make, shapes, *, spectrum="gaussian", schedule=None, dtype=torch.float32,
              steps=range(20), start=None, saved=None):  # fmt: skip
    """(params, optimizer) after the steps of a torch optimizer; `make` gets named parameters."""
    start = start or tensors(problems.weights(shapes), dtype)
    params = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = make(params)
    if saved is not None:
        optimizer.load_state_dict(saved)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in steps:
        for name, grad in tensors(problems.gradients(shapes, step, spectrum), dtype).items():
            params[name].grad = grad
        if schedule is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}, optimizer


def tensors(arrays, dtype=torch.float32):
    return {name: torch.from_numpy(array).to(dtype) for name, array in arrays.items()}


class Difference(NamedTuple):
    """Of one leaf: |ours - theirs| / |theirs - start| in Frobenius norms.

    Attributes:
        value: with theirs as it is, or as it is in float64.
        rounding: how much of it may be that both round their weights at every step, whoever
            computes what is added; 0 where theirs is in float64.
        own: how far theirs is from itself in float64.
    """

    value: float
    rounding: float = 0.0
    own: float | None = None


def distance(ends, exact, start):
    """|ends - exact| / |exact - start|."""
    return float((ends.double() - exact.double()).norm() / (exact.double() - start.double()).norm())


def from_exact(ours, theirs, exact, start):
    """Name -> difference of ours and of theirs from theirs in float64."""
    return {
        name: Difference(
            distance(ours[name], exact[name], begin),
            own=None if theirs is None else distance(theirs[name], exact[name], begin),
        )
        for name, begin in start.items()
    }


def differences(ours, theirs, start):
    """Name -> difference of ours from theirs."""
    found = {}
    for name, begin in start.items():
        moved = (theirs[name].double() - begin.double()).norm()
        unit = torch.finfo(ours[name].dtype).eps / 2
        weight = max(begin.double().norm(), theirs[name].double().norm())
        rounding = 2 * unit * math.sqrt(problems.STEPS) * weight
        value = distance(ours[name], theirs[name], begin)
        found[name] = Difference(value, float(rounding / moved))
    return found
