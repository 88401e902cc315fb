# SPDX-License-Identifier: Apache-2.0
"""The published optimizers as rows of configuration.

A row is a function from the other optimizer's own arguments, with its defaults, to keyword values
of `fmuon.muon`. `fmuon.presets.jordan(lr, **options)` is `muon` with the values of that row;
`options` are arguments of the row, or options of `muon`, which replace what the row says.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, TypeAlias, get_args

from torch import Tensor, nn
from torch import dtype as Dtype

from fmuon.auxiliary import adamw, nadamw
from fmuon.base import (
    ConfigurationError,
    FMuonError,
    Matrix,
    Scalar,
    Transformation,
    is_number,
    lookup,
    near_misses,
)
from fmuon.coefficients import COEFFICIENTS, CoefficientSet
from fmuon.functional import muon
from fmuon.orthogonalize import NewtonSchulz
from fmuon.partition import Label
from fmuon.scalars import is_mask
from fmuon.second_moment import AdaMuon, NorMuon

Values: TypeAlias = dict[str, Any]
"""Keyword values of `fmuon.muon`."""


@dataclass(frozen=True)
class Preset:
    """A row: calling it makes the transformation.

    Attributes:
        source: the package or repository, with its version or commit.
        row: the other optimizer's arguments -> values for `fmuon.muon`.
    """

    source: str
    row: Callable[..., Values]

    def __post_init__(self) -> None:
        # What help() shows of a preset is what its row says.
        object.__setattr__(self, "__doc__", self.row.__doc__)
        object.__setattr__(self, "__signature__", inspect.signature(self.row))

    def __call__(
        self, lr: Scalar | None = None, *, params: Any = None, **options: Any
    ) -> Transformation:
        """`muon` with the values of this row; `params` is the model, for rows that look at it."""
        given = ({} if lr is None else {"lr": lr}) | options
        try:
            return muon(**self.values(params, **given))
        except ConfigurationError as error:
            # What the row calls differently is named as it was given.
            if any(name in str(error) for name in (self.row.__name__, *given)):
                raise
            raise ConfigurationError(f"{self._said(given)}: {error}") from error

    def values(self, params: Any = None, **options: Any) -> Values:
        """The values for `muon`, those in `options` first."""
        names = set(inspect.signature(self.row).parameters)
        known = names | set(inspect.signature(muon).parameters)
        if unknown := [name for name in options if name not in known]:
            raise ConfigurationError(
                f"preset {self.row.__name__!r} has no argument {unknown[0]!r}"
                f"{near_misses(unknown[0], known)}; its own are {', '.join(sorted(names))}, and "
                f"those of fmuon.muon"
            )
        own = {name: options.pop(name) for name in names & set(options)}
        self._check(own)
        given = own | ({"params": params} if "params" in names else {})
        try:
            return self.row(**given) | options
        except FMuonError:
            raise
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{self._said(own)}: {error}") from error

    def _said(self, own: Mapping[str, Any]) -> str:
        arguments = ", ".join(f"{name}={value!r:.80}" for name, value in own.items())
        return f"preset {self.row.__name__!r} with {arguments or 'its defaults'}"

    def _check(self, own: Mapping[str, Any]) -> None:
        """Refuse arguments of another type than the row says; a bool is no number."""
        parameters = inspect.signature(self.row).parameters
        for name, value in own.items():
            annotation = parameters[name].annotation
            kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
            if not all(kind in (bool, int, float, str, Dtype, type(None)) for kind in kinds):
                continue
            fits = any(
                is_number(value, whole=kind is int) if kind in (int, float) else type(value) is kind
                for kind in kinds
            )
            if not fits:
                wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
                raise ConfigurationError(f"{self._said({name: value})}; give a {wanted}")


PRESETS: dict[str, Preset] = {}


def _preset(source: str) -> Callable[[Callable[..., Values]], Preset]:
    """Decorate a row; its name is that of the function."""

    def register(row: Callable[..., Values]) -> Preset:
        preset = Preset(source, row)
        PRESETS[row.__name__] = preset
        return preset

    return register


_Triple: TypeAlias = tuple[float, float, float]
_JORDAN: _Triple = (3.4445, -4.7750, 2.0315)


# ---- optax ---------------------------------------------------------------------------------------


@_preset("optax.contrib.muon 0.2.8")
def optax(
    lr: Scalar = 1e-3,
    ns_coeffs: str | Sequence[Any] = _JORDAN,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Dtype | None = None,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: Scalar | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: float | None = None,
) -> Values:
    """Arguments of optax; its trees of the params may be prefixes, its callables take a leaf.

    `weight_decay_mask` is a tree of bools or (path, tensor) -> bool.
    `muon_weight_dimension_numbers` is a tree, or (path, tensor) -> one of: None (auxiliary), a
    `Matrix`, or what has a `reduction_axis` and an `output_axis`.
    """
    if not isinstance(ns_coeffs, str):
        # An array too.
        ns_coeffs = list(getattr(ns_coeffs, "tolist", lambda: ns_coeffs)())
    power = preconditioning in ("aol", "schatten")
    rule = nadamw if nesterov else adamw
    return {
        "lr": lr,
        "momentum": beta,
        "nesterov": nesterov,
        "weight_decay": weight_decay
        if weight_decay_mask is None
        else _masked(weight_decay, weight_decay_mask),
        "orthogonalize": NewtonSchulz(
            _optax_coefficients(ns_coeffs, ns_steps),
            steps=ns_steps if _is_triple(ns_coeffs) or ns_coeffs == "standard" else None,
            dtype="float32",
            # These two have a threshold of their own.
            eps=1e-8 if power else eps,
            norm="clamp" if power else "add",
            normalization=preconditioning,
        ),
        "adaptive": adaptive,
        "scale": "original" if consistent_rms is None else _ConsistentRms(consistent_rms),
        "momentum_dtype": mu_dtype,
        "auxiliary": rule(
            (adam_b1, adam_b2),
            eps=eps,
            weight_decay=adam_weight_decay,
            lr=adam_learning_rate,
            eps_root=adam_eps_root,
            mu_dtype=mu_dtype,
        ),
        "labels": _OptaxLabels(
            None
            if muon_weight_dimension_numbers is None
            else _by_leaf(muon_weight_dimension_numbers),
            square_by_columns=preconditioning == "aol",
        ),
    }


@dataclass(frozen=True)
class _ConsistentRms:
    """c sqrt(max(fan_out, fan_in))."""

    c: float

    def __call__(self, fan_out: int, fan_in: int) -> float:
        return self.c * math.sqrt(max(fan_out, fan_in))


@dataclass(frozen=True)
class _OptaxLabels:
    """Kernels are (in, out), and without dimension numbers every 2-D leaf is a matrix."""

    numbers: Callable[[str, Tensor], Any] | None
    square_by_columns: bool

    def __call__(self, path: str, leaf: Tensor) -> Label:
        if self.numbers is None:
            label = Matrix(1, 0) if leaf.ndim == 2 else "auxiliary"
        else:
            found = self.numbers(path, leaf)
            label = "auxiliary" if found is None else _matrix(found)
        if not self.square_by_columns or not isinstance(label, Matrix):
            return label
        # What is done row by row meets the rows of the short side, of a square those of fan_in.
        view = label.view(path, tuple(leaf.shape))
        if view.fan_out != view.fan_in:
            return label
        return Matrix(label.fan_in, label.fan_out, label.blocks_in, label.blocks, label.scale)


def _matrix(numbers: Any) -> Matrix:
    if isinstance(numbers, Matrix):
        return numbers
    if not (hasattr(numbers, "output_axis") and hasattr(numbers, "reduction_axis")):
        raise ConfigurationError(
            f"muon_weight_dimension_numbers: {numbers!r} for a leaf; give None, a fmuon.Matrix, or "
            f"what has a reduction_axis and an output_axis"
        )
    fan_out, fan_in = (
        axes if isinstance(axes, int) else tuple(axes)
        for axes in (numbers.output_axis, numbers.reduction_axis)
    )
    return Matrix(fan_out, fan_in)


def _optax_coefficients(coeffs: str | Sequence[Any], steps: int) -> str | CoefficientSet:
    source = "ns_coeffs of the caller"
    if isinstance(coeffs, str):
        name = lookup({"standard": "jordan", "dion": "you"}, coeffs, "ns_coeffs")
        if name == "jordan":
            return name
        source, coeffs = COEFFICIENTS[name].source, COEFFICIENTS[name].published
    if _is_triple(coeffs):
        return CoefficientSet((_triple(coeffs),), source, tail="repeat")
    rows = tuple(_triple(row) for row in coeffs)
    if len(rows) > steps:
        raise ConfigurationError(f"ns_coeffs: {len(rows)} rows, more than ns_steps={steps}")
    return CoefficientSet(rows, source)


def _is_triple(coeffs: Any) -> bool:
    return not isinstance(coeffs, str) and all(isinstance(c, int | float) for c in coeffs)


def _triple(row: Sequence[float]) -> _Triple:
    if len(row) != 3:
        raise ConfigurationError(f"ns_coeffs: {tuple(row)}; every row has three numbers")
    a, b, c = (float(value) for value in row)
    return a, b, c


def _masked(weight_decay: float, mask: Any) -> Callable[[str, Tensor], float]:
    masked = _by_leaf(mask)

    def decay(path: str, leaf: Tensor) -> float:
        return weight_decay * bool(masked(path, leaf))

    return decay


def _by_leaf(tree: Any) -> Callable[[str, Tensor], Any]:
    """A tree of values, or a prefix of one, as a function of the leaf."""
    if callable(tree):
        if not is_mask(tree):
            raise ConfigurationError(
                "weight_decay_mask or muon_weight_dimension_numbers: a callable of the whole tree, "
                "as optax takes it; give one of a leaf, (path, tensor) -> value, or the tree itself"
            )
        return tree
    values = dict(_entries(tree, ""))

    def find(path: str, leaf: Tensor) -> Any:  # noqa: ARG001
        parts = path.split(".")
        for length in range(len(parts), -1, -1):
            if (prefix := ".".join(parts[:length])) in values:
                return values[prefix]
        raise ConfigurationError(f"{path!r}: the tree {tree!r} has no value for this leaf")

    return find


def _entries(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    children: Any = None
    if isinstance(tree, Mapping):
        children = tree.items()
    elif isinstance(tree, list | tuple) and not hasattr(tree, "reduction_axis"):
        children = enumerate(tree)
    if children is None:
        yield prefix, tree
        return
    for key, child in children:
        yield from _entries(child, f"{prefix}.{key}" if prefix else str(key))


@_preset("a function of that name around muon-optimizer, made to equal optax.contrib.muon")
def muon_with_aux_adam(lr: Scalar = 1e-3, params: Any = None) -> Values:
    """Every 2-D parameter a matrix: (out, in) in nn.Linear, (in, out) elsewhere.

    A missing gradient counts as zero. `params` is the module.
    """
    if not isinstance(params, nn.Module):
        raise ConfigurationError(
            "muon_with_aux_adam: weights of nn.Linear are told from other matrices by their "
            "module; give the model: FMuon(model, preset=...), or presets.muon_with_aux_adam(lr, "
            "params=model)"
        )
    linear = {id(m.weight) for m in params.modules() if isinstance(m, nn.Linear)}
    views = {
        path: (Matrix() if id(p) in linear else Matrix(1, 0)) if p.ndim == 2 else "auxiliary"
        for path, p in params.named_parameters()
    }
    return optax.values(lr=lr) | {"labels": views, "missing": "zero"}


# ---- KellerJordan, Moonlight, torch --------------------------------------------------------------


@_preset("github.com/KellerJordan/Muon 857d1ad and muon-optimizer 0.1.0")
def jordan(
    lr: Scalar = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    adam_lr: float = 3e-4,
    adam_betas: tuple[float, float] = (0.9, 0.95),
    adam_eps: float = 1e-10,
    adam_weight_decay: float = 0.0,
) -> Values:
    """SingleDeviceMuon and SingleDeviceMuonWithAuxAdam; `adam_*` are of the group without Muon.

    A missing gradient counts as zero. A convolution is one matrix, scaled by the sides of its
    kernel. The older form, which had no Adam, differs by weight_decay=0.01.
    """
    return {
        "lr": lr,
        "momentum": momentum,
        "bias_correction": False,
        "weight_decay": weight_decay,
        "orthogonalize": NewtonSchulz("jordan", dtype="bfloat16", eps=1e-7, norm="add"),
        "scale": "original",
        "auxiliary": adamw(adam_betas, eps=adam_eps, lr=adam_lr, weight_decay=adam_weight_decay),
        "labels": _jordan_view,
        "missing": "zero",
    }


def _jordan_view(path: str, leaf: Tensor) -> Matrix | None:
    if leaf.ndim == 4:
        height, width = leaf.shape[2:]
        return Matrix(0, (1, 2, 3), scale=math.sqrt(max(1.0, height / width)))
    return _stack_view(path, leaf)


def _stack_view(path: str, leaf: Tensor) -> Matrix | None:  # noqa: ARG001
    """The last two axes; what a matrix is among 2-D leaves is for others to say."""
    return Matrix(-2, -1) if leaf.ndim > 2 else None


@_preset("torch.optim.Muon 2.13, with the adjust_lr_fn that 2.14 adds")
def torch(
    lr: Scalar = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Sequence[float] = _JORDAN,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Values:
    """Arguments of torch.optim.Muon, which takes matrices only; other leaves follow AdamW."""
    family = CoefficientSet((_triple(ns_coefficients),), "ns_coefficients", tail="repeat")
    scales = {
        "original": "original",
        "match_rms_adamw": "match_rms_adamw",
        "spectral_unclamped": "spectral",
    }
    return {
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov,
        "bias_correction": False,
        "weight_decay": weight_decay,
        "orthogonalize": NewtonSchulz(
            family, steps=ns_steps, dtype="bfloat16", eps=eps, norm="clamp"
        ),
        "scale": lookup(scales, adjust_lr_fn or "original", "adjust_lr_fn"),
    }


@_preset("github.com/MoonshotAI/Moonlight c2ad5b2, examples/toy_train.py")
def moonlight(
    lr: Scalar = 1e-3,
    wd: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
) -> Values:
    """Arguments of the Muon of Moonlight."""
    return {
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov,
        "bias_correction": False,
        "weight_decay": wd,
        "orthogonalize": NewtonSchulz(
            "jordan", steps=ns_steps, dtype="bfloat16", eps=_of_average(1e-7, momentum), norm="add"
        ),
        "scale": "match_rms_adamw",
        "auxiliary": adamw(adamw_betas, eps=adamw_eps, eps_first=True),
    }


def _of_average(eps: float, momentum: float) -> float:
    """The eps of a momentum M <- b M + G, for ours, which is (1 - b) times that."""
    return eps * (1 - momentum)


# ---- dion, NorMuon -------------------------------------------------------------------------------


@_preset("github.com/microsoft/dion 0a059a4, Muon and NorMuon")
def dion(
    lr: Scalar = 0.01,
    mu: float = 0.95,
    muon_beta2: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
    cautious_wd: bool = False,
    epsilon: float = 1e-8,
    nesterov: bool = False,
    adjust_lr: str | None = "spectral_norm",
    flatten: bool = False,
    use_polar_express: bool = True,
) -> Values:
    """Arguments of the Muon of dion; with `muon_beta2` (0.95 there) those of its NorMuon.

    Leaves of more axes are stacks of matrices (the last two axes), or with `flatten` one matrix.
    """
    scales = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw", "none": "none"}
    return {
        "lr": lr,
        "momentum": mu,
        "nesterov": nesterov,
        "bias_correction": False,
        "weight_decay": weight_decay,
        "decay": "cautious" if cautious_wd else "decoupled",
        "orthogonalize": NewtonSchulz(
            "polar_express_nanogpt" if use_polar_express else "you",
            dtype="bfloat16",
            eps=_of_average(epsilon, mu),
            norm="add",
        ),
        "second_moment": None
        if muon_beta2 is None
        else NorMuon(muon_beta2, eps=1e-8, norm="clamp"),
        "scale": lookup(scales, adjust_lr or "none", "adjust_lr"),
        "auxiliary": adamw(betas, eps=epsilon),
        "labels": _flat_view if flatten else _stack_view,
    }


def _flat_view(path: str, leaf: Tensor) -> Matrix | None:  # noqa: ARG001
    return Matrix(0, tuple(range(1, leaf.ndim))) if leaf.ndim > 2 else None


@_preset("github.com/zichongli5/NorMuon d45c9a4, SingleDeviceNorMuon")
def normuon(
    lr: Scalar = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    beta2: float = 0.95,
    axis: str = "rows",
    adam_lr: float = 3e-4,
    adam_betas: tuple[float, float] = (0.9, 0.95),
    adam_eps: float = 1e-10,
    adam_weight_decay: float = 0.0,
) -> Values:
    """The authors' code; axis="long" averages as modded-nanogpt and nanochat do.

    A missing gradient counts as zero. Leaves of more axes are stacks of matrices; the authors
    orthogonalise a convolution as one matrix, and even out its last two axes, which is not matched.
    """
    return jordan.row(
        lr, weight_decay, momentum, adam_lr, adam_betas, adam_eps, adam_weight_decay
    ) | {"second_moment": NorMuon(beta2, axis), "labels": _stack_view}


# ---- variants ------------------------------------------------------------------------------------


def _moonlike(lr: Scalar, weight_decay: float, momentum: Scalar, nesterov: bool) -> Values:
    """Muon as Moonlight scales it, which these papers vary."""
    return {
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov,
        "bias_correction": False,
        "weight_decay": weight_decay,
        "scale": "match_rms_adamw",
    }


@_preset("github.com/Chongjie-Si/AdaMuon 369f0b3, gpt2/models/optimizers/adamuon.py")
def adamuon(
    lr: Scalar = 0.02,
    weight_decay: float = 0.01,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    eps: float = 1e-8,
) -> Values:
    """The authors' code: signs of the momentum orthogonalised, evened out entry by entry.

    The second moment decays as the momentum does. A convolution is one matrix.
    """
    return _moonlike(lr, weight_decay, momentum, nesterov) | {
        "orthogonalize": NewtonSchulz(
            "jordan", steps=ns_steps, dtype="bfloat16", eps=1e-7, norm="add"
        ),
        "equilibrate": "sign",
        "second_moment": AdaMuon(momentum, eps, bias_correction=False),
        "labels": _adamuon_view,
    }


def _adamuon_view(path: str, leaf: Tensor) -> Matrix | None:
    if leaf.ndim != 4:
        return _stack_view(path, leaf)
    # Their norm is 0.2 sqrt(shortest axis times longest).
    short = min(leaf.shape[0], math.prod(leaf.shape[1:]))
    return Matrix(0, (1, 2, 3), scale=0.2 * math.sqrt(min(leaf.shape) * max(leaf.shape) / short))


@_preset("arXiv 2603.28254 (MuonEq)")
def muon_eq(
    lr: Scalar = 1e-3,
    weight_decay: float = 0.1,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    form: str = "R",
) -> Values:
    """`form` is R, C or RC: what gets equal norms before the orthogonalisation."""
    forms = {"R": "rows", "C": "columns", "RC": "rows_and_columns"}
    return _moonlike(lr, weight_decay, momentum, nesterov) | {
        "equilibrate": lookup(forms, form, "form")
    }


@_preset(
    "arXiv 2602.21545 (Muon+); lr, decay and norm_mode of github.com/K1seki221/MuonPlus 44f2934"
)
def muon_plus(
    lr: Scalar = 0.04,
    weight_decay: float = 0.05,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    norm_mode: str = "row_col",
) -> Values:
    """`norm_mode` is row, col, row_col or col_row: what gets norms of 1 then, in that order."""
    modes = {
        "row": "rows",
        "col": "columns",
        "row_col": "rows_columns",
        "col_row": "columns_rows",
    }
    return _moonlike(lr, weight_decay, momentum, nesterov) | {
        "renormalize": lookup(modes, norm_mode, "norm_mode")
    }


@_preset("github.com/karpathy/nanochat 92d63d4, nanochat/optim.py")
def nanochat(
    lr: Scalar = 0.02,
    weight_decay: Scalar | Callable[[str, Tensor], float] = 0.0,
    momentum: Scalar = 0.95,
    ns_steps: int = 5,
    beta2: float = 0.9,
    adam_lr: float = 0.004,
    adam_betas: tuple[float, float] = (0.8, 0.96),
    adam_eps: float = 1e-10,
    adam_weight_decay: float = 0.0,
) -> Values:
    """Rows made equal, Polar Express, the norm of an exact factor, NorMuon, cautious decay.

    Leaves of more axes are stacks of matrices; the `adam_*` are those of its output head, and a
    dict of rules as `auxiliary` gives other leaves theirs. Two things of its decay are not matched:
    that of a tall matrix is multiplied by its scale there (a callable (path, tensor) -> number
    can say so), and that of AdamW is not cautious. The schedules of rate, decay and momentum are
    the caller's: `momentum=lambda step: 0.85 + 0.12 * (step / 400).clamp(max=1)`.
    """
    express = COEFFICIENTS["polar_express_nanogpt"]
    express = replace(express, published=express.published[:ns_steps], norm_safety=1.01)
    return {
        "lr": lr,
        "momentum": momentum,
        "bias_correction": False,
        "weight_decay": weight_decay,
        "decay": "cautious",
        "equilibrate": "rows",
        "orthogonalize": NewtonSchulz(express, dtype="bfloat16", eps=1e-6, norm="add"),
        "renormalize": "frobenius",
        "second_moment": NorMuon(beta2, "long", eps=1e-10, norm="clamp", root="clamp"),
        "scale": "original",
        "auxiliary": adamw(adam_betas, eps=adam_eps, lr=adam_lr, weight_decay=adam_weight_decay),
        "labels": _stack_view,
    }
