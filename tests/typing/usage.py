# SPDX-License-Identifier: Apache-2.0
"""What a user's type checker sees: checked by pyright in `make check`, never run."""

# An expected error that is none any more is an error.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import fmuon

Params = dict[str, Tensor]


def functional(params: Params, grads: Params, step: Tensor) -> Params:
    """The pure functions."""
    opt = fmuon.muon(1e-3, momentum=0.9, scale="spectral", auxiliary=fmuon.lion())
    assert_type(opt, fmuon.Transformation)
    state = opt.init(params)
    assert_type(state, dict[str, Any])
    updates, state = opt.update(grads, state, step, params, lr=1e-3)
    assert_type(state, dict[str, Any])
    fmuon.update_(opt, params, grads, state, step)
    return fmuon.apply_updates(params, updates)


def scheduled(step: Tensor) -> Tensor:
    """A scalar may be a callable of the step."""
    return 1e-3 / (step + 1)


def options() -> None:
    """What options may be."""
    fmuon.muon(scheduled, weight_decay=torch.tensor(0.1))
    fmuon.muon(weight_decay=lambda path, tensor: 0.1 if tensor.ndim > 1 else 0.0)
    fmuon.muon(scale=lambda fan_out, fan_in: (fan_out / fan_in) ** 0.5)
    fmuon.muon(labels={"w": "muon", "re:.*b": "auxiliary", "kernel": fmuon.Matrix(1, 0)})
    fmuon.muon(labels=lambda path, tensor: "muon" if tensor.ndim == 2 else None)
    fmuon.muon(auxiliary={"adamw": fmuon.adamw(), "sgd": fmuon.sgd()})
    fmuon.muon(momentum_dtype=torch.bfloat16, rounding=fmuon.Stochastic(1), metrics=("lr",))
    fmuon.muon(orthogonalize=fmuon.NewtonSchulz("polar_express", dtype=torch.float32))
    fmuon.muon(orthogonalize=fmuon.Auto("high"), second_moment=fmuon.NorMuon())
    fmuon.muon("1e-3")  # pyright: ignore[reportArgumentType]
    fmuon.muon(nesterov="yes")  # pyright: ignore[reportArgumentType]
    fmuon.muon(learning_rate=1e-3)  # pyright: ignore[reportCallIssue]


def methods(x: Tensor) -> None:
    """Methods are callables of tensors."""
    for method in (fmuon.NewtonSchulz(), fmuon.GramNewtonSchulz(), fmuon.Zolotarev(3)):
        assert_type(method(x), Tensor)
    assert_type(fmuon.PolarSVD()(x), Tensor)
    fmuon.NewtonSchulz(steps="five")  # pyright: ignore[reportArgumentType]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """FMuon is an optimizer, and a scheduler takes it."""
    made = fmuon.FMuon(model, lr=1e-3, compile=False, preset="torch")
    torch.optim.lr_scheduler.CosineAnnealingLR(made, 10)
    assert_type(made.state_dict(), dict[str, Any])
    assert_type(made.metrics(), dict[str, float])
    assert_type(fmuon.parameter_lists(made), dict[str, list[Tensor]])
    return made


def compiled(params: Params) -> None:
    """compile keeps the type of a function."""

    def step(params: Params, lr: float) -> Params:
        return {name: p * lr for name, p in params.items()}

    assert_type(fmuon.compile(step)(params, 1.0), Params)


def rest(params: Params, model: nn.Module) -> None:
    """Helpers beside the update."""
    clipped, norm = fmuon.clip_by_global_norm(params, 1.0)
    assert_type(norm, Tensor)
    assert_type(fmuon.global_norm(clipped), Tensor)
    assert_type(fmuon.label(model), dict[str, Any])
    str(fmuon.explain(model, fmuon.presets.jordan(0.02)))
    layers = {"attn": fmuon.Attention(4, query="q", key=fmuon.Heads("k", 8))}
    fmuon.qk_clip(params, {"attn": norm}, layers=layers)
