# SPDX-License-Identifier: Apache-2.0
"""The optimizers that are compared, each at a setting that is as close to the same step as it has.

The same step: momentum 0.95 as an average, Nesterov, five Newton-Schulz steps with Jordan's
coefficients, the scale sqrt(max(1, rows / columns)), no weight decay. Who can't do that is run as
it is and marked: its `same` is False.
"""

import importlib
import importlib.metadata
import importlib.util
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

import fmuon
from fmuon.orthogonalize import multiplies_bfloat16

LR = 0.02
MOMENTUM = 0.95
TRIPLE = (3.4445, -4.7750, 2.0315)
MODE = "default"
"""Mode of torch.compile: no CUDA graphs, and no tuning of products, on a CPU."""


class Running(NamedTuple):
    """An optimizer at work: `step` reads the gradients of its parameters."""

    step: Callable[[], Any]
    weights: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Subject:
    """An optimizer that can be built on parameters.

    Attributes:
        name: shown in the tables.
        module: must be importable.
        package: name of its distribution.
        products: dtype of the matrix products, or "none".
        build: parameters -> the optimizer at work.
        same: whether its mathematics is that of the same step.
        method: "newton_schulz", "gram" (the same polynomial with fewer flops), or what else it is.
    """

    name: str
    module: str
    package: str
    products: str
    build: Callable[[list[nn.Parameter]], Running] = field(repr=False)
    same: bool = True
    method: str = "newton_schulz"

    @property
    def version(self) -> str | None:
        """The installed version; None where the package is missing."""
        if importlib.util.find_spec(self.module) is None:
            return None
        return importlib.metadata.version(self.package)


def subjects() -> list[Subject]:
    """All of them, for the dtypes that the CPU multiplies."""
    native = multiplies_bfloat16(torch.device("cpu"))
    methods = {
        "float32": fmuon.NewtonSchulz(dtype="float32"),
        "float32, Gram form": fmuon.GramNewtonSchulz(dtype="float32"),
        "bfloat16": fmuon.NewtonSchulz(dtype="bfloat16"),
    }
    own = [
        Subject(
            name=f"{form}, {setting}",
            module="fmuon",
            package="fmuon",
            products=setting.split(",")[0],
            build=build(method),
            method="gram" if "Gram" in setting else "newton_schulz",
        )
        for setting, method in methods.items()
        for form, build in _FORMS.items()
        if native or setting != "bfloat16"
    ]
    return [*own, *_PEERS]


# ---- fmuon ---------------------------------------------------------------------------------------


Method: TypeAlias = Callable[[Tensor], Tensor]
Build: TypeAlias = Callable[[list[nn.Parameter]], Running]

OPTIONS: dict[str, Any] = {
    "lr": LR,
    "momentum": MOMENTUM,
    "bias_correction": False,
    "scale": "original",
}
"""Of `fmuon.muon`, for the same step."""


def shim(method: Method, compile: str | bool) -> Build:
    """The optimizer class."""

    def build(params: list[nn.Parameter]) -> Running:
        group = {"params": params, "use_muon": True}
        optimizer = fmuon.FMuon([group], compile=compile, orthogonalize=method, **OPTIONS)
        return Running(optimizer.step, lambda: params)

    return build


def _functional(method: Method, compiled: bool) -> Build:
    """New weights and a new state from the old ones, as a train step makes them."""

    def build(params: list[nn.Parameter]) -> Running:
        opt = fmuon.muon(orthogonalize=method, **OPTIONS)
        weights: dict[str, Tensor] = {str(i): p.detach() for i, p in enumerate(params)}
        state, count = opt.init(weights), 0

        def function(weights: Any, grads: Any, state: Any, step: Any) -> Any:
            updates, state = opt.update(grads, state, step)
            return fmuon.apply_updates(weights, updates), state

        if compiled:
            function = fmuon.compile(function, MODE)

        def step() -> None:
            nonlocal weights, state, count
            grads = {str(i): p.grad for i, p in enumerate(params)}
            weights, state = function(weights, grads, state, count)
            count += 1

        return Running(step, lambda: list(weights.values()))

    return build


_FORMS: dict[str, Callable[[Method], Build]] = {
    "FMuon": lambda method: shim(method, compile=False),
    "FMuon compiled": lambda method: shim(method, compile=MODE),
    "update": lambda method: _functional(method, compiled=False),
    "update compiled": lambda method: _functional(method, compiled=True),
}


# ---- peers ---------------------------------------------------------------------------------------


def _optimizer(make: Callable[[list[nn.Parameter]], Any]) -> Build:
    def build(params: list[nn.Parameter]) -> Running:
        return Running(make(params).step, lambda: params)

    return build


def patched(module: str, old: str, new: str) -> types.ModuleType:
    """A private copy of an installed module with one piece of its source replaced."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(old) == 1, f"{module} is not the version whose source is patched here"
    copy = types.ModuleType(f"{module}_patched")
    exec(compile(source.replace(old, new), spec.origin, "exec"), copy.__dict__)
    return copy


def _torch(params: list[nn.Parameter]) -> Any:
    return torch.optim.Muon(params, lr=LR, momentum=MOMENTUM, weight_decay=0.0)


def _muon_optimizer(params: list[nn.Parameter]) -> Any:
    return importlib.import_module("muon").SingleDeviceMuon(params, lr=LR, momentum=MOMENTUM)


def _muon_optimizer_float32(params: list[nn.Parameter]) -> Any:
    module = patched("muon", "G.bfloat16()", "G.float()")
    return module.SingleDeviceMuon(params, lr=LR, momentum=MOMENTUM)


def _optimuon(**options: Any) -> Build:
    return _optimizer(
        lambda params: importlib.import_module("optimuon").Muon(
            params, lr=LR, momentum=MOMENTUM, **options
        )
    )


_JORDAN = {"ns_coefficients": TRIPLE, "ns_norm_scale": 1.0, "ns_eps": 1e-7, "normuon": False}


def _pytorch_optimizer(params: list[nn.Parameter]) -> Any:
    # Its defaults are its fastest on a CPU: foreach, no Gram form (float16), no adjusted lr.
    group = {"params": params, "use_muon": True}
    return importlib.import_module("pytorch_optimizer").Muon([group], lr=LR, momentum=MOMENTUM)


def _heavyball(params: list[nn.Parameter]) -> Any:
    return importlib.import_module("heavyball").Muon(params, lr=LR, betas=(MOMENTUM, 0.99))


def _adamw(params: list[nn.Parameter]) -> Any:
    return torch.optim.AdamW(params, lr=LR, foreach=True)


_PEERS = (
    Subject(
        "muon-optimizer, patched to float32",
        "muon",
        "muon-optimizer",
        "float32",
        _optimizer(_muon_optimizer_float32),
    ),
    Subject(
        "optimuon, float32",
        "optimuon",
        "optimuon",
        "float32",
        _optimuon(ns_dtype=torch.float32, gram_ns=False, **_JORDAN),
    ),
    Subject(
        "optimuon, float32, Gram form",
        "optimuon",
        "optimuon",
        "float32",
        _optimuon(ns_dtype=torch.float32, gns_restart_after=None, **_JORDAN),
        method="gram",
    ),
    Subject(
        "optimuon, float32, else as it is",
        "optimuon",
        "optimuon",
        "float32",
        _optimuon(ns_dtype=torch.float32),
        same=False,
        method="gram, Polar Express, NorMuon",
    ),
    Subject("torch.optim.Muon", "torch", "torch", "bfloat16", _optimizer(_torch)),
    Subject("muon-optimizer", "muon", "muon-optimizer", "bfloat16", _optimizer(_muon_optimizer)),
    Subject(
        "optimuon, bfloat16",
        "optimuon",
        "optimuon",
        "bfloat16",
        _optimuon(ns_dtype=torch.bfloat16, gram_ns=False, **_JORDAN),
    ),
    Subject(
        "pytorch-optimizer",
        "pytorch_optimizer",
        "pytorch-optimizer",
        "bfloat16",
        _optimizer(_pytorch_optimizer),
    ),
    Subject(
        "heavyball",
        "heavyball",
        "heavyball",
        "bfloat16",
        _optimizer(_heavyball),
        same=False,
        method="other coefficients, stochastic rounding",
    ),
    Subject(
        "optimuon, as it is",
        "optimuon",
        "optimuon",
        "float16",
        _optimuon(),
        same=False,
        method="gram, Polar Express, NorMuon",
    ),
    Subject(
        "torch.optim.AdamW, foreach",
        "torch",
        "torch",
        "none",
        _optimizer(_adamw),
        same=False,
        method="AdamW",
    ),
)
