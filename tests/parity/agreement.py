# SPDX-License-Identifier: Apache-2.0
"""Both optimizers over the same 20 steps, and how far apart they end."""

import math
from typing import NamedTuple

import problems
import torch

import fmuon


def run(opt, shapes, *, spectrum="gaussian", schedule=None, dtype=torch.float32, steps=range(20),
        start=None, state=None):  # fmt: skip
    """(params, state) after the steps of a transformation, by name."""
    params = start or tensors(problems.weights(shapes), dtype)
    state = opt.init(params) if state is None else state
    for step in steps:
        grads = tensors(problems.gradients(shapes, step, spectrum), dtype)
        scalars = {} if schedule is None else {"lr": schedule(step)}
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
    """Of one leaf: |ours - theirs| / |theirs - start|, and how much of it may be that both round
    their weights at every step, whoever computes what is added."""

    value: float
    rounding: float


def differences(ours, theirs, start):
    """Name -> difference in Frobenius norms."""
    found = {}
    for name, begin in start.items():
        moved = (theirs[name].double() - begin.double()).norm()
        apart = (ours[name].double() - theirs[name].double()).norm()
        unit = torch.finfo(ours[name].dtype).eps / 2
        weight = max(begin.double().norm(), theirs[name].double().norm())
        rounding = 2 * unit * math.sqrt(problems.STEPS) * weight
        found[name] = Difference(float(apart / moved), float(rounding / moved))
    return found
