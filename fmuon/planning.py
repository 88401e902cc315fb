# SPDX-License-Identifier: Apache-2.0
"""Configuration + names, shapes and dtypes of a call -> a frozen plan of who is updated with whom.

Runs outside the trace, once per signature: a compiled update holds the plan as a constant. Every
check of an update is made here, before anything is computed or written.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fmuon.auxiliary import Rule
from fmuon.balance import EQUILIBRATIONS, RENORMALIZATIONS
from fmuon.base import (
    ConfigurationError,
    LeafError,
    Matrix,
    Scalar,
    StateError,
    View,
    check_flag,
    constant_in_graphs,
    is_number,
    lookup,
    near_misses,
)
from fmuon.buckets import Bucket, MatrixLeaf, plan, together
from fmuon.collectives import SHARDINGS, is_sharded, sharding_number
from fmuon.decay import DECAYS
from fmuon.lowbit import FORMATS, check_installed, fits
from fmuon.methods import flops_of
from fmuon.metrics import METRICS, SKIPPED, metric_key
from fmuon.orthogonalize import Orthogonalizer
from fmuon.partition import Assignment, Label, Labels, Leaf, as_view, assign, check_key, declared
from fmuon.rounding import Stochastic
from fmuon.scalars import check_scalar, is_mask
from fmuon.scaling import ScaleRule
from fmuon.second_moment import SecondMoment
from fmuon.sharding import Mesh, Sharding

MISSING = ("skip", "zero", "error")
NONFINITE = ("propagate", "skip")
MASTERS = (None, "mantissa")
# Options that are names.
_CHOICES: dict[str, Collection[str | None]] = {
    "missing": MISSING,
    "nonfinite": NONFINITE,
    "decay": DECAYS,
    "master": MASTERS,
    "equilibrate": (None, *EQUILIBRATIONS),
    "renormalize": (None, *RENORMALIZATIONS),
}
# The dicts of a state that hold tensors of matrices.
MOMENTUM = "momentum"
SCALE = "momentum_scale"
SECOND = "second_moment"
# The dict of what the leaves of 16 bits can't hold.
MANTISSA = "mantissa"
_LABELS = ("muon", "auxiliary", "frozen", "error")


@dataclass(frozen=True)
class Configuration:
    """The options of `fmuon.muon`, checked."""

    lr: Scalar
    momentum: Scalar
    nesterov: bool
    bias_correction: bool
    weight_decay: Scalar | Callable[[str, Tensor], float]
    decay: str
    orthogonalize: Orthogonalizer
    adaptive: bool
    equilibrate: str | None
    renormalize: str | None
    second_moment: SecondMoment | None
    scale: ScaleRule
    momentum_dtype: torch.dtype | str | None
    rounding: Stochastic | None
    master: str | None
    metrics: tuple[str, ...]
    mesh: Mesh | None
    auxiliary: Rule | tuple[tuple[str, Rule], ...]
    labels: Labels
    missing: str
    nonfinite: str
    max_stack_bytes: int | None
    differentiable: bool

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, Mapping | torch.nn.Module):
                raise ConfigurationError(
                    f"{name}: a {type(value).__name__} is no scalar; give a number, a 0-d tensor "
                    f"or a callable of the step (values for single leaves are given to update)"
                )
            check_scalar(name, value)
        for name in ("nesterov", "bias_correction", "adaptive", "differentiable"):
            check_flag(name, getattr(self, name))
        entries = self.labels if isinstance(self.labels, tuple) else ()
        pairs = all(isinstance(entry, tuple) and len(entry) == 2 for entry in entries)  # pyright: ignore
        given = self.labels is None or isinstance(self.labels, tuple) or callable(self.labels)
        if not (given and pairs):
            raise ConfigurationError(f"labels={self.labels!r}; give a dict, a callable, or None")
        for name, known in _CHOICES.items():
            # Compared, as what can't be hashed is in no dict.
            if getattr(self, name) not in tuple(known):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}; known: {', '.join(map(repr, known))}"
                )
        for name in self.metrics:
            lookup(METRICS, name, "metric")
        self._check_storage()
        room = self.max_stack_bytes
        if room is not None and not (is_number(room, whole=True) and 0 < room < 2**63):
            raise ConfigurationError(f"max_stack_bytes={room!r}: must be positive, an int")
        reserved = {"muon", "frozen", "error", MOMENTUM, SCALE, SECOND, MANTISSA}
        if not self.rules or reserved & set(self.rules):
            raise ConfigurationError(
                f"auxiliary: {sorted(map(str, self.rules))}; give a rule, or a dict name -> rule "
                f"with one entry at least and none of the names {sorted(reserved)}"
            )
        for key, label in self.labels if isinstance(self.labels, tuple) else ():
            check_key(key)
            self.check_label(f"labels[{key!r}]", label)

    def _check_storage(self) -> None:
        dtype = self.momentum_dtype
        if isinstance(dtype, str):
            lookup(FORMATS, dtype, "momentum_dtype")
            check_installed(dtype)
        elif dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point  # pyright: ignore
        ):
            raise ConfigurationError(
                f"momentum_dtype={dtype!r}: give a floating point torch.dtype, None, or one of "
                f"{', '.join(map(repr, FORMATS))}"
            )
        if self.master is not None and self.rounding is not None:
            raise ConfigurationError(
                f"rounding={self.rounding!r} beside master={self.master!r}, which keeps what "
                f"rounding drops; give one of the two"
            )
        options = {"momentum_dtype": isinstance(dtype, str) and dtype}
        options |= {"rounding": self.rounding, "master": self.master}
        rounded = [f"{name}={value!r}" for name, value in options.items() if value]
        if self.differentiable and rounded:
            raise ConfigurationError(
                f"differentiable=True beside {rounded[0]}, which has no derivative; leave out one"
            )

    @property
    def rules(self) -> dict[str | None, Rule]:
        """The auxiliary rules by name; None is the name of the only one."""
        return {None: self.auxiliary} if isinstance(self.auxiliary, Rule) else dict(self.auxiliary)

    def rule_name(self, label: Any) -> str | None:
        """The name of the rule that a label other than a `Matrix` stands for."""
        return label if label in self.rules else next(iter(self.rules))

    def check_label(self, where: str, label: Any) -> None:
        """Refuse what is no label of this configuration."""
        names = [rule.name if name is None else name for name, rule in self.rules.items()]
        if isinstance(label, Matrix) or label in (*_LABELS, *names):
            return
        known = [*_LABELS, *names]
        raise LeafError(
            f"{where}: unknown label {label!r}; known: a fmuon.Matrix, "
            f"{', '.join(map(repr, known))}{near_misses(str(label), known)}"
        )

    @property
    def kept(self) -> tuple[str, ...]:
        """The dicts of a state that hold tensors of matrices."""
        scale = (SCALE,) if isinstance(self.momentum_dtype, str) else ()
        second = () if self.second_moment is None else (SECOND,)
        return (MOMENTUM, *scale, *second)

    @property
    def agreed(self) -> tuple[Any, ...]:
        """The options that ranks which share leaves must have in common."""
        return (
            self.orthogonalize, self.max_stack_bytes, self.missing, self.nonfinite,
            self.equilibrate, self.renormalize, self.second_moment, self.adaptive, self.decay,
            self.momentum_dtype, self.rounding, self.master,
        )  # fmt: skip

    @property
    def stores(self) -> tuple[str, ...]:
        """The keys that a state must have."""
        return (*self.kept, "auxiliary", "missed", *(() if self.master is None else (MANTISSA,)))

    def has_mantissa(self, path: str, dtype: torch.dtype) -> bool:
        """Whether the state keeps what a leaf of this dtype can't hold; refuses float16."""
        if self.master is not None and dtype == torch.float16:
            raise LeafError(
                f"{path!r}: master={self.master!r} splits a float32 into bfloat16 and its other 16 "
                f"bits, and this leaf is float16; make it bfloat16, or give "
                f"rounding='stochastic' instead"
            )
        return self.master is not None and dtype == torch.bfloat16

    def kept_shapes(self, path: str, view: View) -> dict[str, tuple[int, ...]]:
        """The shapes of the moments of a matrix leaf, by the dict of the state that holds them."""
        if self.second_moment is None:
            return {MOMENTUM: view.shape}
        return {MOMENTUM: view.shape, SECOND: self.second_moment.shape(path, view)}

    def metric_keys(self, leaves: Iterable[tuple[str, bool]]) -> list[str]:
        """Keys of the metrics of leaves, given as (path, whether it is a matrix)."""
        leaves, keys = list(leaves), list[str]()
        for name in self.metrics:
            source = METRICS[name].source
            if source == "step":
                keys.append(metric_key(name))
            else:
                keys += [
                    metric_key(name, p) for p, is_matrix in leaves if is_matrix or source != "stack"
                ]
        return keys

    def assign(
        self,
        leaves: Mapping[str, Tensor | None],
        routed: Mapping[str, Assignment] | None = None,
    ) -> dict[str, Assignment]:
        """Every leaf's label and reason, checked against what the leaf is.

        `routed` is what the module says of leaves that have no label here.
        """
        tensors = {path: leaf for path, leaf in leaves.items() if leaf is not None}
        specs = {path: Leaf(tuple(leaf.shape), leaf.dtype) for path, leaf in tensors.items()}
        assignments = assign(specs, self.labels, routed)
        for path, (label, _, _) in assignments.items():
            self.check_label(repr(path), label)
            if label != "frozen":
                check_trainable(path, tensors[path])
                self.has_mantissa(path, specs[path].dtype)
            if isinstance(label, Matrix):
                self.kept_shapes(path, label.view(path, specs[path].shape))
        none = {path: Assignment("frozen", "None") for path in leaves if path not in tensors}
        return {path: (assignments | none)[path] for path in leaves}


def check_trainable(path: str, leaf: Tensor) -> None:
    """Refuse a leaf that no rule can train: sparse, complex, of integers, or flattened shards."""
    if type(leaf).__name__ == "FlatParameter":
        raise LeafError(
            f"{path!r}: a flattened shard of several parameters (FSDP1), in which no matrix can be "
            f"found; shard with torch.distributed.fsdp.fully_shard instead"
        )
    if is_sharded(leaf):
        mesh: Any = leaf.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        if leaf.device.type != mesh.device_type:
            raise LeafError(
                f"{path!r}: its shards are on {leaf.device}, its mesh on {mesh.device_type!r}; "
                f"offloaded parameters can't be exchanged: keep them on the mesh's devices"
            )
    if leaf.layout != torch.strided:
        raise LeafError(f"{path!r}: sparse parameter ({leaf.layout}); make it dense")
    if leaf.dtype.is_complex:
        raise LeafError(
            f"{path!r}: complex parameter ({leaf.dtype}); train torch.view_as_real of it, or label "
            f"it 'frozen'"
        )
    if not leaf.dtype.is_floating_point:
        raise LeafError(
            f"{path!r}: dtype {leaf.dtype}; floating point needed, or label it 'frozen'"
        )


def check_not_empty(assignments: Mapping[str, Assignment]) -> None:
    """Raise where no leaf is a matrix, unless every leaf was labelled so explicitly."""
    if any(isinstance(a.label, Matrix) for a in assignments.values()):
        return
    if assignments and all(a.explicit for a in assignments.values()):
        return
    frozen = sum(a.label == "frozen" for a in assignments.values())
    raise LeafError(
        f"no leaf was assigned to Muon ({len(assignments) - frozen} auxiliary, {frozen} frozen); "
        f"pass the matrices of the model, or label every leaf if this is meant; "
        f"print(fmuon.explain(model)) shows why each leaf got what it has"
    )


# ---- the plan of an update -----------------------------------------------------------------------


class Spec(NamedTuple):
    """What planning knows of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    number: int | None = None

    @property
    def sharding(self) -> Sharding | None:
        """How it is sharded; None for a plain tensor."""
        return None if self.number is None else SHARDINGS[self.number]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this rank holds."""
        return self.shape if self.sharding is None else self.sharding.local_shape


Specs: TypeAlias = Mapping[str, Spec | None]
Held: TypeAlias = dict[tuple[str | None, str], Spec]
# The same as nested tuples of constants, which dynamo hands to code that it doesn't trace.
Signature: TypeAlias = tuple[tuple[str, tuple[Any, ...] | None], ...]


@dataclass(frozen=True)
class RuleGroup:
    """Leaves of one rule and one shape; `name` is the rule's in `Configuration.rules`."""

    paths: tuple[str, ...]
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Plan:
    """Who is updated with whom.

    Attributes:
        groups: buckets of matrices and groups of other leaves.
        idle: leaves without a gradient, which are left alone.
        empty: matrix leaves without elements.
        shared: (ranks, paths, device) of leaves that several ranks update alike or in parts.
    """

    groups: tuple[Bucket | RuleGroup, ...]
    idle: tuple[str, ...]
    empty: tuple[str, ...]
    shared: tuple[tuple[tuple[int, ...], tuple[str, ...], torch.device], ...]


def signature(leaves: Mapping[str, Tensor | None]) -> Signature:
    """Names, shapes, dtypes, devices and layouts as constants."""
    # operator.index makes dynamo specialise on a size that it holds to be symbolic.
    return tuple(
        (
            path,
            None if leaf is None else (*_of(leaf), _sharding(path, leaf)),
        )
        for path, leaf in leaves.items()
    )


def _of(leaf: Tensor) -> tuple[Any, ...]:
    return tuple(map(operator.index, leaf.shape)), leaf.dtype, leaf.device, leaf.layout


def _sharding(path: str, leaf: Any) -> int | None:
    if not is_sharded(leaf):
        return None
    return sharding_number(path, leaf.device_mesh, leaf.placements, _of(leaf)[0])


def _specs(leaves: Signature) -> dict[str, Spec | None]:
    return {path: None if spec is None else Spec(*spec) for path, spec in leaves}


@constant_in_graphs
def plan_update(*arguments: Any) -> Plan:
    """`_plan_update`, as a constant of the trace; a cache between eager calls."""
    return _plan_update(*arguments)


# Dynamo would trace through the cache of a decorated function, and so into the planning.
@functools.lru_cache(maxsize=64)
def _plan_update(
    config: Configuration,
    grads: Signature,
    matrices: tuple[tuple[str, Signature], ...],
    slots: tuple[tuple[str | None, str, Signature], ...],
    missed: Signature,
    params: Signature | None,
    named: tuple[tuple[str, str], ...],
    decays: bool,
    in_place: bool,
) -> Plan:
    """Check that gradients, state, params and configuration fit together, and group the leaves.

    Args:
        config: the options.
        grads: of the gradients.
        matrices: (name, leaves) of the state's dicts of matrices.
        slots: (rule name, slot name, leaves) of the state's auxiliary slots.
        missed: of the state's counts, which name all of its leaves.
        params: of the params where they were passed.
        named: (option, path) for every leaf that a per-call dict names.
        decays: whether weights decay in this call.
        in_place: whether params and state are written.
    """
    gradients = _specs(grads)
    weights = None if params is None else _specs(params)
    counts = _specs(missed)
    _check_names(config, gradients, tuple(counts), weights, named, decays)
    stored = _stored((*((name, name, leaves) for name, leaves in matrices), *slots), counts)
    found: list[MatrixLeaf] = []
    shared: dict[tuple[tuple[int, ...], torch.device], list[str]] = {}
    others: dict[tuple[Any, ...], list[str]] = {}
    idle: list[str] = []
    empty: list[str] = []
    for path in sorted(counts):
        gradient, held = gradients[path], stored[path]
        mantissa = held.pop((MANTISSA, MANTISSA), None)
        if gradient is None and config.missing == "error":
            raise LeafError(
                f"{path!r}: its gradient is None and missing='error'; pass a gradient, or choose "
                f"missing='skip' (leave the leaf alone) or 'zero' (as if it were zero)"
            )
        # The momentum comes first; scales and second moment have other shapes.
        like = next(iter(held.values()), gradient)
        sharding = None if like is None else sharding_of(config, like)
        mesh = None if sharding is None else sharding.mesh
        if like is None or (gradient is None and config.missing == "skip" and mesh is None):
            idle.append(path)
            continue
        if mesh is not None:
            # Whether such a leaf is left alone is for all of its ranks to decide.
            shared.setdefault((tuple(sorted(mesh.ranks)), like.device), []).append(path)
        weight = None if weights is None else weights[path]
        _check_tensors(config, path, gradient, held, like, weight)
        _check_mantissa(config, path, weight, mantissa)
        label = _label_in_state(config, path, like, held)
        present = (like, gradient, weight)
        double = any(spec is not None and spec.dtype == torch.float64 for spec in present)
        dtype = torch.float64 if double else torch.float32
        if not isinstance(label, Matrix):
            name = config.rule_name(label)
            key = name, dtype, like.device, *together(path, like.local_shape)
            others.setdefault(key, []).append(path)
        elif 0 in like.shape:
            empty.append(path)
        else:
            leaf = matrix_leaf(config, path, label, like, dtype)
            if 0 in leaf.view.shape:
                empty.append(path)
            else:
                found.append(leaf)
    flops = flops_of(config.orthogonalize)
    groups = (
        *plan(found, config.scale, config.max_stack_bytes, in_place=in_place, flops=flops),
        *(
            RuleGroup(tuple(paths), name, shape, dtype, device)
            for (name, dtype, device, shape, *_), paths in others.items()
        ),
    )
    return Plan(
        groups,
        tuple(idle),
        tuple(empty),
        tuple((ranks, tuple(paths), device) for (ranks, device), paths in shared.items()),
    )


def sharding_of(config: Configuration, spec: Spec) -> Sharding | None:
    """How a leaf is shared: on the mesh of the options, which may say more than its own."""
    own, mesh = spec.sharding, config.mesh
    if mesh is None:
        return own
    return Sharding(spec.shape, mesh, (None,) * len(mesh.shape)) if own is None else own.on(mesh)


def matrix_leaf(
    config: Configuration,
    path: str,
    label: Matrix,
    spec: Spec,
    dtype: torch.dtype,
    sharding: Sharding | None = None,
) -> MatrixLeaf:
    """A matrix leaf as the buckets need it: what is whole on this rank has no sharding.

    `sharding` is how it is shared, if not as its tensor is.
    """
    sharding = sharding or sharding_of(config, spec)
    view = label.view(path, spec.shape)
    if sharding is not None:
        if sharding.domain is not None:
            _check_shared(config, path, sharding)
        stack_axes = view.order[: len(view.order) - len(view.row_axes) - len(view.column_axes)]
        _check_second_moment(config, path, view, sharding)
        whole, sharding = sharding, sharding.within(stack_axes)
        if config.adaptive and sharding.shape != whole.shape:
            raise ConfigurationError(
                f"{path!r} is a stack of matrices that is sharded along the stack, and "
                f"adaptive=True needs all matrices of a leaf on one rank; leave it out, or shard "
                f"the leaf along another axis"
            )
        view = label.view(path, sharding.shape)
    if sharding is None or sharding.domain is None:
        return MatrixLeaf(path, view, dtype, spec.device)
    return MatrixLeaf(path, view, dtype, spec.device, sharding)


def _check_shared(config: Configuration, path: str, sharding: Sharding) -> None:
    """Refuse options that a leaf which several ranks share, or have parts of, can't be given."""
    options: dict[str, Any] = {"differentiable": config.differentiable}
    options["metrics"] = tuple(name for name in config.metrics if name != SKIPPED)
    for option, value in options.items():
        if value:
            raise ConfigurationError(
                f"{path!r} is shared among the ranks {sorted(sharding.mesh.ranks)}, and "
                f"{option}={value!r} needs whole leaves on every rank; set it to its default"
            )


def _check_second_moment(config: Configuration, path: str, view: View, sharding: Sharding) -> None:
    """Refuse where a rank gets nothing of what it keeps averages of."""
    if config.second_moment is None:
        return
    shape = config.second_moment.shape(path, view)
    averaged = [axis for axis, side in enumerate(shape) if side == 1 != sharding.shape[axis]]
    empty = any(part[axis][0] == part[axis][1] for part in sharding.parts() for axis in averaged)
    if empty:
        raise ConfigurationError(
            f"{path!r} of shape {sharding.shape} is sharded along an axis that is shorter than it "
            f"has parts, and {config.second_moment} averages along it; shard it along another "
            f"axis, or over fewer ranks"
        )


def _stored(sources: Sequence[tuple[str | None, str, Signature]], missed: Specs) -> dict[str, Held]:
    """Path -> what the state holds of it, by (holder, slot).

    The holder is the name of a rule, or that of a dict of matrices, which is its slot too.
    """
    stored: dict[str, Held] = {path: {} for path in missed}
    for holder, slot, leaves in sources:
        for path, spec in _specs(leaves).items():
            if path not in stored:
                raise StateError(f"{path!r}: the state holds {slot!r} for it, but no 'missed'")
            assert spec is not None
            stored[path][holder, slot] = spec
    for path, spec in missed.items():
        if spec is None or spec.shape != () or spec.dtype.is_complex:
            raise StateError(f"{path!r}: its 'missed' must be a 0-d tensor of integers")
    return stored


def _check_names(
    config: Configuration,
    grads: Specs,
    known: Sequence[str],
    params: Specs | None,
    named: Sequence[tuple[str, str]],
    decays: bool,
) -> None:
    absent = [path for path in known if path not in grads]
    unknown = [
        path
        for path, spec in grads.items()
        if path not in set(known) and spec is not None and not _is_frozen(config, path, spec)
    ]
    if unknown or absent:
        raise StateError(
            f"grads and state don't name the same leaves; missing from grads: {absent}; unknown to "
            f"the state: {unknown}; pass None for a leaf without a gradient, and make the state "
            f"with init(params) of the same leaves"
        )
    for option, path in named:
        if path not in known:
            raise LeafError(f"{option}: {path!r} is no leaf of the state{near_misses(path, known)}")
    needs = _needs_params(config, decays)
    if needs is not None and params is None:
        raise ConfigurationError(
            f"{needs[0]} needs the params: call update(grads, state, step, params), or {needs[1]}"
        )
    if params is not None and (absent := [p for p in known if params.get(p) is None]):
        raise LeafError(f"params: missing the leaves {absent}, which the state has")


def _needs_params(config: Configuration, decays: bool) -> tuple[str, str] | None:
    """What the params are needed for, and how to do without it."""
    if decays:
        return "weight decay", "set weight_decay=0"
    if config.rounding is not None:
        return f"rounding={config.rounding}", "set rounding='nearest'"
    if config.master is not None:
        return f"master={config.master!r}", "set master=None"
    reading = [name for name in config.metrics if METRICS[name].needs_params]
    return (f"the metric {reading[0]!r}", "leave it out") if reading else None


def _is_frozen(config: Configuration, path: str, spec: Spec) -> bool:
    return declared(path, Leaf(spec.shape, spec.dtype), config.labels)[0] == "frozen"


def _check_tensors(
    config: Configuration,
    path: str,
    grad: Spec | None,
    held: Held,
    like: Spec,
    param: Spec | None,
) -> None:
    """All tensors of a leaf have one shape and one device, and are dense and floating point."""
    if grad is not None and grad.layout != torch.strided:
        raise LeafError(
            f"{path!r}: sparse gradient ({grad.layout}); make it dense with .to_dense(), or build "
            f"the layer with sparse=False"
        )
    tensors = {"gradient": grad, "param": param}
    tensors |= {f"state {s!r}": spec for (_, s), spec in held.items() if s not in (SECOND, SCALE)}
    codes = None
    if (SCALE, SCALE) in held and isinstance(config.momentum_dtype, str):
        codes = f"state {MOMENTUM!r}"
        _check_codes(path, config.momentum_dtype, like, held[SCALE, SCALE])
    for what, spec in tensors.items():
        if spec is None:
            continue
        if not spec.dtype.is_floating_point and what != codes:
            raise LeafError(f"{path!r}: {what} of dtype {spec.dtype}; floating point needed")
        if spec.sharding != like.sharding:
            raise LeafError(
                f"{path!r}: {what} is sharded as {_placed(spec)}, state as {_placed(like)}; the "
                f"two must be equal: redistribute it, or make a new state with init(params)"
            )
        if spec.shape != like.shape or spec.device != like.device:
            raise LeafError(
                f"{path!r}: {what} of shape {spec.shape} on {spec.device}, state of shape "
                f"{like.shape} on {like.device}; the two must be equal (init(params) makes a new "
                f"state)"
            )


def _check_codes(path: str, name: str, codes: Spec, scale: Spec) -> None:
    if codes.dtype != FORMATS[name].codes or not fits(codes.local_shape, scale.local_shape):
        raise StateError(
            f"{path!r}: the state holds a momentum of {codes.dtype} and shape {codes.shape} with "
            f"scales of shape {scale.shape}, which is none of momentum_dtype={name!r}; use the opt "
            f"that made this state"
        )


def _check_mantissa(
    config: Configuration, path: str, weight: Spec | None, mantissa: Spec | None
) -> None:
    """A leaf has a mantissa if its dtype is the one that needs it."""
    dtype = None if weight is None else weight.dtype
    if (mantissa is not None) != (dtype is not None and config.has_mantissa(path, dtype)):
        raise StateError(
            f"{path!r}: the state holds {'no' if mantissa is None else 'a'} mantissa for it, which "
            f"does not go with master={config.master!r} and params of {dtype}; make the state with "
            f"the opt, and of the params, that are used"
        )
    if mantissa is None or weight is None:
        return
    if mantissa.dtype != torch.uint8 or mantissa.shape != (*weight.shape, 2):
        raise StateError(
            f"{path!r}: its mantissa has {mantissa.dtype} and shape {mantissa.shape}, and needs "
            f"torch.uint8 and {(*weight.shape, 2)}; use the state that this opt made"
        )


def _placed(spec: Spec) -> str:
    if spec.sharding is None:
        return "a plain tensor"
    splits = [
        "a replica" if split is None else f"shards of axis {split.axis}"
        for split in spec.sharding.splits
    ]
    return f"{', '.join(splits)} on a mesh of {spec.sharding.mesh.shape}"


def _label_in_state(config: Configuration, path: str, like: Spec, held: Held) -> Label:
    """The label of a leaf of the state; what the state holds and the configuration must agree."""
    label, source = declared(path, Leaf(like.shape, like.dtype), config.labels)
    has_momentum = (MOMENTUM, MOMENTUM) in held
    if label is None and has_momentum and len(like.shape) != 2:
        raise StateError(
            f"{path!r}: the state has a momentum of shape {like.shape}, for which this opt "
            f"declares no matrix view; use the opt that made this state"
        )
    if label is None:
        label, source = (Matrix() if has_momentum else "auxiliary"), "the default"
    label = as_view(path, like.shape, label)
    if isinstance(label, Matrix):
        expected = {(name, name) for name in config.kept}
    else:
        name = config.rule_name(label)
        expected = {(name, slot) for slot in config.rules[name].slots}
    if label in ("frozen", "error") or set(held) != expected:
        found = ", ".join(repr(slot) for _, slot in held) or "nothing"
        raise StateError(
            f"{path!r}: {source} says {label!r}, but the state holds {found} for it; use the opt "
            f"that made this state"
        )
    if isinstance(label, Matrix):
        for name, shape in config.kept_shapes(path, label.view(path, like.shape)).items():
            if held[name, name].shape != shape:
                raise StateError(
                    f"{path!r}: the state's {name!r} has the shape {held[name, name].shape}, this "
                    f"opt keeps {shape}; use the opt that made this state"
                )
    return label


@constant_in_graphs
def masked_decay(decay: Any, params: Signature) -> tuple[tuple[str, float], ...] | None:
    """(path, value) for every leaf, where the decay is a callable (path, tensor) -> number."""
    if not is_mask(decay):
        return None
    return tuple(
        (path, float(decay(path, torch.empty(spec[0], dtype=spec[1], device="meta"))))
        for path, spec in params
        if spec is not None
    )
