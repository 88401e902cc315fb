# SPDX-License-Identifier: Apache-2.0
"""The optimizers that are compared, each at a setting that is as close to the same step as it has.

The same step: momentum 0.95 as an average, Nesterov, five Newton-Schulz steps with Jordan's
coefficients, the scale sqrt(max(1, rows / columns)), no weight decay. Who can't do that is run as
it is and marked: its `same` is False.
"""

import importlib.metadata
import importlib.util
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


Method: TypeAlias = Callable[[Tensor], Tensor]
Build: TypeAlias = Callable[[list[nn.Parameter]], Running]


@dataclass(frozen=True)
class Subject:
    """An optimizer that can be built on parameters.

    Attributes:
        name: shown in the tables.
        package: name of its distribution.
        products: dtype of the matrix products, or "none".
        build: parameters -> the optimizer at work.
        method: "newton_schulz", "gram" (the same polynomial with fewer flops), or what else it is.
        same: whether its mathematics is that of the same step.
    """

    name: str
    package: str
    products: str
    build: Build
    method: str = "newton_schulz"
    same: bool = True

    @property
    def version(self) -> str | None:
        """The installed version, "unknown" for a folder of sources; None where it is missing."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            spec = importlib.util.find_spec(self.package.replace("-", "_"))
            return None if spec is None else "unknown"


def subjects() -> list[Subject]:
    """All of them, for the dtypes that the CPU multiplies."""
    native = multiplies_bfloat16(torch.device("cpu"))
    methods = {
        "float32": fmuon.NewtonSchulz(dtype="float32"),
        "float32, Gram form": fmuon.GramNewtonSchulz(dtype="float32"),
        "float32, auto": fmuon.Auto(),
        "bfloat16": fmuon.NewtonSchulz(dtype="bfloat16"),
    }
    own = [
        Subject(
            name=f"{form}, {setting}",
            package="fmuon",
            products=setting.split(",")[0],
            build=build(method),
            method={"float32, Gram form": "gram", "float32, auto": "auto"}.get(
                setting, "newton_schulz"
            ),
            same=setting != "float32, auto",
        )
        for setting, method in methods.items()
        for form, build in _FORMS.items()
        if native or setting != "bfloat16"
    ]
    return [*own, *_PEERS]


# ---- fmuon ---------------------------------------------------------------------------------------


OPTIONS: dict[str, Any] = {
    "lr": LR,
    "momentum": MOMENTUM,
    "bias_correction": False,
    "scale": "original",
}
"""Of `fmuon.muon`, for the same step."""


def shim(method: Method, compile: str | bool) -> Build:
    """The class."""

    def build(params: list[nn.Parameter]) -> Running:
        group = {"params": params, "use_muon": True}
        optimizer = fmuon.FMuon([group], compile=compile, orthogonalize=method, **OPTIONS)
        return Running(optimizer.step, lambda: params)

    return build


def pure_step(opt: fmuon.Transformation, mode: str | None) -> Callable[..., tuple[Any, Any]]:
    """(weights, grads, state, step) -> new weights and a new state; the old stay as they are.

    Compiled in a mode of torch.compile, or eager with None.
    """

    def step(weights: Any, grads: Any, state: Any, step: Any) -> tuple[Any, Any]:
        updates, state = opt.update(grads, state, step)
        return fmuon.apply_updates(weights, updates), state

    return fmuon.compile(step, mode) if mode else step


def functional(method: Method, mode: str | None) -> Build:
    """The pure functions."""

    def build(params: list[nn.Parameter]) -> Running:
        opt = fmuon.muon(orthogonalize=method, **OPTIONS)
        function = pure_step(opt, mode)
        weights: dict[str, Tensor] = {str(i): p.detach() for i, p in enumerate(params)}
        state, count = opt.init(weights), 0

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
    "update": lambda method: functional(method, None),
    "update compiled": lambda method: functional(method, MODE),
}


# ---- by hand -------------------------------------------------------------------------------------


def newton_schulz(x: Tensor) -> Tensor:
    """[..., m, n] -> [..., m, n], in the dtype of x."""
    a, b, c = TRIPLE
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


@torch.no_grad()
def loop_step(
    params: Sequence[nn.Parameter], momentum: Sequence[Tensor], method: Method = newton_schulz
) -> None:
    """One matrix after the other."""
    for p, m in zip(params, momentum, strict=True):
        m.lerp_(p.grad, 1 - MOMENTUM)
        scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        p.add_(method(p.grad.lerp(m, MOMENTUM)), alpha=-LR * scale)


def loop(params: list[nn.Parameter], method: Method = newton_schulz) -> Running:
    """The loop at work."""
    momentum = [torch.zeros_like(p, requires_grad=False) for p in params]
    return Running(lambda: loop_step(params, momentum, method), lambda: params)


# ---- peers ---------------------------------------------------------------------------------------


def optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Build:
    """Any torch.optim.Optimizer."""

    def build(params: list[nn.Parameter]) -> Running:
        return Running(make(params).step, lambda: params)

    return build


def compiled(build: Build) -> Build:
    """The same with its whole step in torch.compile, breaks and all."""

    def build_compiled(params: list[nn.Parameter]) -> Running:
        # All of them share the code of torch.optim.Optimizer, and with it a limit of 8 graphs.
        torch._dynamo.config.recompile_limit = 64
        running = build(params)
        return Running(torch.compile(running.step), running.weights)

    return build_compiled


def torch_muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The one that torch has."""
    return torch.optim.Muon(params, lr=LR, momentum=MOMENTUM, weight_decay=0.0)


def _muon_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from muon import SingleDeviceMuon

    return SingleDeviceMuon(params, lr=LR, momentum=MOMENTUM)


def _muon_optimizer_float32(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    module = _patched("muon", "G.bfloat16()", "G.float()")
    return module.SingleDeviceMuon(params, lr=LR, momentum=MOMENTUM)


def _patched(module: str, old: str, new: str) -> types.ModuleType:
    """A private copy of an installed module with one piece of its source replaced."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(old) == 1, f"{module} is not the version whose source is patched here"
    copy = types.ModuleType(f"{module}_patched")
    exec(compile(source.replace(old, new), spec.origin, "exec"), copy.__dict__)
    return copy


def _optimuon(**options: Any) -> Build:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        from optimuon import Muon

        return Muon(params, lr=LR, momentum=MOMENTUM, **options)

    return optimizer(make)


def _pytorch_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from pytorch_optimizer import Muon

    # Its defaults are its fastest on a CPU: foreach, no Gram form (float16), no adjusted lr.
    return Muon([{"params": params, "use_muon": True}], lr=LR, momentum=MOMENTUM)


def _heavyball(**options: Any) -> Build:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        from heavyball import Muon

        return Muon(params, lr=LR, betas=(MOMENTUM, 0.99), **options)

    return optimizer(make)


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, foreach=True)


_SAME = {"ns_coefficients": TRIPLE, "ns_norm_scale": 1.0, "ns_eps": 1e-7, "normuon": False}
_STANDARD = _SAME | {"gram_ns": False}
_GRAM = _SAME | {"gns_restart_after": None}

_PEERS = (
    Subject(
        "muon-optimizer, patched to float32",
        "muon-optimizer",
        "float32",
        optimizer(_muon_optimizer_float32),
    ),
    Subject(
        "optimuon, float32", "optimuon", "float32", _optimuon(ns_dtype=torch.float32, **_STANDARD)
    ),
    Subject(
        "optimuon, float32, Gram form",
        "optimuon",
        "float32",
        _optimuon(ns_dtype=torch.float32, **_GRAM),
        method="gram",
    ),
    Subject(
        "optimuon compiled, float32, Gram form",
        "optimuon",
        "float32",
        compiled(_optimuon(ns_dtype=torch.float32, **_GRAM)),
        method="gram",
    ),
    Subject(
        "optimuon, float32, else as it is",
        "optimuon",
        "float32",
        _optimuon(ns_dtype=torch.float32),
        method="gram, Polar Express, NorMuon",
        same=False,
    ),
    Subject("torch.optim.Muon", "torch", "bfloat16", optimizer(torch_muon)),
    Subject("torch.optim.Muon compiled", "torch", "bfloat16", compiled(optimizer(torch_muon))),
    Subject("muon-optimizer", "muon-optimizer", "bfloat16", optimizer(_muon_optimizer)),
    Subject(
        "optimuon, bfloat16",
        "optimuon",
        "bfloat16",
        _optimuon(ns_dtype=torch.bfloat16, **_STANDARD),
    ),
    Subject("pytorch-optimizer", "pytorch-optimizer", "bfloat16", optimizer(_pytorch_optimizer)),
    Subject(
        "pytorch-optimizer compiled",
        "pytorch-optimizer",
        "bfloat16",
        compiled(optimizer(_pytorch_optimizer)),
    ),
    *(
        Subject(
            name,
            "heavyball",
            "bfloat16",
            _heavyball(**options),
            method="other coefficients, stochastic rounding",
            same=False,
        )
        for name, options in {
            "heavyball": {},
            "heavyball compiled": {"compile_step": True},
        }.items()
    ),
    Subject(
        "optimuon, as it is",
        "optimuon",
        "float16",
        _optimuon(),
        method="gram, Polar Express, NorMuon",
        same=False,
    ),
    Subject("torch.optim.AdamW, foreach", "torch", "none", optimizer(_adamw), "AdamW", same=False),
)
