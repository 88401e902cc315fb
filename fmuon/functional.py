# SPDX-License-Identifier: Apache-2.0
"""The algorithm: `muon`, `init`, `update`, `update_` and `apply_updates`.

One step of a matrix leaf with gradient G, momentum M and weight W: average and look ahead
(`momentum`), gather the matrix views of equal shape in stacks (`buckets`), orthogonalise each stack
(`orthogonalize`), go back to the leaf's shape, and add

    -lr (scale O + weight_decay W)                       [Liu et al. 2025, arXiv 2502.16982, eq. 3]

The other leaves follow a rule of `auxiliary`. Who is stacked with whom is decided in `planning`;
everything here computes.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmuon.auxiliary import Rule, adamw
from fmuon.base import (
    ConfigurationError,
    Matrix,
    Scalar,
    Stack,
    State,
    StateError,
    Transformation,
    Tree,
)
from fmuon.buckets import Bucket, stack, unstack
from fmuon.momentum import average, look_ahead
from fmuon.orthogonalize import NewtonSchulz, Orthogonalizer, orthogonalizer
from fmuon.partition import Label
from fmuon.planning import Configuration, Plan, RuleGroup, masked, plan_update, signature
from fmuon.scalars import Scalars, check_scalar, is_callable, is_zero, resolve
from fmuon.scaling import ScaleRule, scale_rule
from fmuon.tree import flatten

Leaves: TypeAlias = Mapping[str, Tensor | None]


class Muon(Configuration):
    """The configuration behind a `Transformation`; make one with `muon`."""

    def init(self, params: Tree, step: int = 0) -> State:
        """The state of leaves that have seen no update; see `fmuon.init`."""
        leaves, _ = flatten(params)
        nested = not isinstance(self.auxiliary, Rule)
        slots = {name: {slot: {} for slot in rule.slots} for name, rule in self.rules.items()}
        state: State = {
            "momentum": {},
            "auxiliary": slots if nested else slots[None],
            "missed": {},
        }
        for path, (label, _, _) in self.assign(leaves).items():
            leaf = leaves[path]
            if leaf is None or label == "frozen":
                continue
            state["missed"][path] = torch.full((), step, dtype=torch.int64, device=leaf.device)
            if isinstance(label, Matrix):
                state["momentum"][path] = _zeros(leaf)
            else:
                for slot in slots[self.rule_name(label)].values():
                    slot[path] = _zeros(leaf)
        return state

    def update(
        self,
        grads: Tree,
        state: State,
        step: int | Tensor,
        params: Tree = None,
        *,
        lr: Scalars | None = None,
        weight_decay: Scalars | None = None,
        momentum: Scalars | None = None,
        betas: Any = None,
        eps: Scalars | None = None,
        present: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tree, State]:
        """What to add to the params, and the new state; see `fmuon.update`."""
        with contextlib.nullcontext() if self.differentiable else torch.no_grad():
            leaves, structure = flatten(grads, "grads")
            weights = None if params is None else flatten(params)[0]
            call = _Call(self, step, weights, lr, weight_decay, momentum, betas, eps, present)
            plan = _plan(self, leaves, state, call)
            new = {name: _copy(state[name]) for name in state}
            updates: dict[str, Tensor] = {}
            for group in plan.groups:
                changes, slots = _advance(self, group, leaves, state, call)
                for path, change in zip(group.paths, changes, strict=True):
                    updates[path] = _strided(change, state["momentum"].get(path))
                for slot, tensors in slots.items():
                    old, store = _store(state, group, slot), _store(new, group, slot)
                    for path, tensor in zip(group.paths, tensors, strict=True):
                        store[path] = _owned(tensor, old[path])
            for path in plan.empty:
                updates[path] = torch.zeros_like(state["momentum"][path])
            for path in plan.idle:
                new["missed"][path] = state["missed"][path] + 1
            for path, here in call.present.items():
                new["missed"][path] = state["missed"][path] + here.logical_not()
            strided = {
                path: _strided(u, state["momentum"].get(path)) for path, u in updates.items()
            }
            return structure.rebuild(strided), new

    @torch.no_grad()
    def update_(
        self,
        params: Tree,
        grads: Tree,
        state: State,
        step: int | Tensor,
        *,
        lr: Scalars | None = None,
        weight_decay: Scalars | None = None,
        momentum: Scalars | None = None,
        betas: Any = None,
        eps: Scalars | None = None,
        present: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the new params and state over the old ones; see `fmuon.update_`."""
        leaves, _ = flatten(grads, "grads")
        weights, _ = flatten(params)
        call = _Call(self, step, weights, lr, weight_decay, momentum, betas, eps, present)
        plan = _plan(self, leaves, state, call)
        for group in plan.groups:
            changes, slots = _advance(self, group, leaves, state, call)
            torch._foreach_add_(_pick(weights, group.paths), changes)
            for slot, tensors in slots.items():
                torch._foreach_copy_(_pick(_store(state, group, slot), group.paths), tensors)
        for path in plan.idle:
            state["missed"][path].add_(1)
        for path, here in call.present.items():
            state["missed"][path].add_(here.logical_not())


class _Call:
    """The step, params and scalars of one call, and the configuration's where none is given.

    A weight decay or beta given for all leaves stands in for the configuration's; one given in a
    dict is that leaf's own.
    """

    def __init__(
        self,
        config: Configuration,
        step: int | Tensor,
        params: Leaves | None,
        lr: Scalars | None,
        weight_decay: Scalars | None,
        momentum: Scalars | None,
        betas: Any,
        eps: Scalars | None,
        present: Mapping[str, Tensor] | None,
    ) -> None:
        self.params = params
        self.present: Mapping[str, Tensor] = {} if present is None else present
        self.step = step if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64)
        beta1, beta2 = _split(betas)
        given = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
        }
        self.given: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        for name, value in self.given.items():
            check_scalar(name, value)
        self.defaults: dict[str, Any] = {
            "lr": config.lr,
            "momentum": config.momentum,
            "weight_decay": config.weight_decay,
        }
        self.decays = not is_zero(self.given.get("weight_decay", config.weight_decay)) or any(
            not is_zero(rule.weight_decay or 0) for rule in config.rules.values()
        )
        for values in (self.given, self.defaults):
            decay = values.get("weight_decay")
            if is_callable(decay):
                by_leaf = masked(decay, None if params is None else signature(params))
                values["weight_decay"] = decay if by_leaf is None else dict(by_leaf)

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """(option, path) of every leaf that a dict of this call names."""
        options = {**self.given, "present": self.present}
        return tuple(
            (option, path)
            for option, value in options.items()
            if isinstance(value, Mapping)
            for path in value
        )

    def of(
        self, option: str, paths: Sequence[str], device: torch.device, rule: Rule | None = None
    ) -> Tensor:
        """An option for some leaves: float64, 0-d or one entry per leaf."""
        default = self.defaults.get(option)
        if rule is not None and option in ("beta1", "beta2", "eps"):
            default = rule.eps if option == "eps" else rule.betas[option == "beta2"]
        return resolve(self.given.get(option, default), default, self.step, paths, device)

    def rate(self, group: Bucket | RuleGroup) -> Tensor:
        """The learning rate of the leaves of a group."""
        rate = self.of("lr", group.paths, group.device)
        return rate if isinstance(group, Bucket) else rate * group.rule.lr_scale

    def decay(self, group: Bucket | RuleGroup) -> Tensor | None:
        """The weight decay of the leaves of a group; None where it is the constant 0."""
        default = self.defaults["weight_decay"]
        value = self.given.get("weight_decay", default)
        own = None if isinstance(group, Bucket) else group.rule.weight_decay
        if own is not None:
            value, default = (value if isinstance(value, Mapping) else own), own
        if is_zero(value):
            return None
        return resolve(value, default, self.step, group.paths, group.device)

    def count(self, state: State, paths: Sequence[str]) -> Tensor:
        """t of every leaf: its updates including this one, float64."""
        missed = torch.stack(_pick(state["missed"], paths))
        return (self.step - missed + 1).to(torch.float64)

    def masked(self, new: Tensor, paths: Sequence[str], old: Tensor | float = 0.0) -> Tensor:
        """The new stack, but the old one (or zeros) for leaves whose gradient is not present."""
        if not any(path in self.present for path in paths):
            return new
        always = torch.ones((), dtype=torch.bool, device=self.step.device)
        here = torch.stack([self.present.get(path, always) for path in paths])
        return torch.where(_spread(here.to(new.device), new), new, old)


def _split(betas: Any) -> tuple[Any, Any]:
    if isinstance(betas, Mapping):
        pairs: Mapping[str, Any] = betas
        return {p: pair[0] for p, pair in pairs.items()}, {p: pair[1] for p, pair in pairs.items()}
    return (None, None) if betas is None else (betas[0], betas[1])


def _plan(config: Configuration, grads: Leaves, state: State, call: _Call) -> Plan:
    if not {"momentum", "auxiliary", "missed"} <= set(state):
        raise StateError(f"no state of fmuon: it has the keys {sorted(state)}; make it with init")
    stores: Mapping[str, Any] = state["auxiliary"]
    by_rule: Any = {None: stores} if isinstance(config.auxiliary, Rule) else stores
    return plan_update(
        config,
        signature(grads),
        signature(state["momentum"]),
        tuple(
            (name, slot, signature(leaves))
            for name, store in by_rule.items()
            for slot, leaves in store.items()
        ),
        tuple(state["missed"]),
        None if call.params is None else signature(call.params),
        call.named,
        call.decays,
    )


def _advance(
    config: Configuration, group: Bucket | RuleGroup, grads: Leaves, state: State, call: _Call
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Updates and new slots of one bucket or rule group, as views; writes nothing."""
    if isinstance(group, Bucket):
        updates, new = _matrix_step(config, group, grads, state, call)
    else:
        updates, new = _rule_step(group, grads, state, call)
    decay = call.decay(group)
    if decay is not None and call.params is not None:
        c = call.masked(-call.rate(group) * decay, group.paths).to(group.dtype)
        coefficients = c.unbind() if c.ndim else [c] * len(updates)
        weights = [weight.to(group.dtype) for weight in _pick(call.params, group.paths)]
        updates = [
            torch.addcmul(u, w, c) for u, w, c in zip(updates, weights, coefficients, strict=True)
        ]
    return updates, new


def _matrix_step(
    config: Configuration, bucket: Bucket, grads: Leaves, state: State, call: _Call
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    moments = _pick(state["momentum"], bucket.paths)
    gradients = [
        _or_zeros(grads[path], moment) for path, moment in zip(bucket.paths, moments, strict=True)
    ]
    updates: list[Stack] = []
    averages: list[Stack] = []
    stacks = zip(bucket.stacks, stack(bucket, gradients), stack(bucket, moments), strict=True)
    for spec, grad, moment in stacks:
        t = _spread(call.count(state, spec.paths), grad)
        b = _spread(call.of("momentum", spec.paths, bucket.device), grad)
        new = average(moment, grad, b)
        look = look_ahead(
            new, grad, b, t, nesterov=config.nesterov, bias_correction=config.bias_correction
        )
        rate = -call.of("lr", spec.paths, bucket.device) * _constant(spec.scales, bucket.device)
        update = config.orthogonalize(look) * _spread(rate, grad).to(bucket.dtype)
        updates.append(call.masked(update, spec.paths))
        averages.append(call.masked(new, spec.paths, moment))
    return unstack(bucket, updates), {"momentum": unstack(bucket, averages)}


def _rule_step(
    group: RuleGroup, grads: Leaves, state: State, call: _Call
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    paths, rule = group.paths, group.rule
    slots = {
        slot: _stacked(_pick(_store(state, group, slot), paths)).to(group.dtype)
        for slot in rule.slots
    }
    zeros = torch.zeros(group.shape, dtype=group.dtype, device=group.device)
    grad = _stacked([_or_zeros(grads[path], zeros) for path in paths]).to(group.dtype)
    t = _spread(call.count(state, paths), grad)
    beta1, beta2, eps = (
        _spread(call.of(option, paths, group.device, rule), grad)
        for option in ("beta1", "beta2", "eps")
    )
    direction, new = rule.direction(grad, slots, t, (beta1, beta2), eps)
    update = direction * _spread(-call.rate(group), grad).to(group.dtype)
    masked = {slot: call.masked(new[slot], paths, slots[slot]) for slot in rule.slots}
    return list(call.masked(update, paths).unbind()), {
        s: list(x.unbind()) for s, x in masked.items()
    }


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    # Planning lets None through only for missing="zero".
    return torch.zeros_like(like) if grad is None else grad


def _stacked(tensors: list[Tensor]) -> Tensor:
    # A view where there is one.
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _spread(values: Tensor, stack: Tensor) -> Tensor:
    """[k] -> [k, 1, ...], to broadcast over the members of a stack; 0-d stays."""
    return values.reshape(-1, *[1] * (stack.ndim - 1)) if values.ndim else values


def _constant(values: Sequence[float], device: torch.device) -> float | Tensor:
    """A number if all are equal, else a float64 vector."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)


def _strided(update: Tensor, like: Tensor | None) -> Tensor:
    """The update with the strides of its leaf: a tall matrix comes back as a transposed view."""
    if like is None or like.stride() == update.stride():
        return update
    order, inverse = _memory_order(like)
    return update.permute(order).contiguous().permute(inverse)


def _owned(new: Tensor, old: Tensor) -> Tensor:
    """A copy with the strides and the dtype of the old, so that no leaf keeps a stack alive."""
    order, inverse = _memory_order(old)
    copy = new.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute(inverse).to(old.dtype)


def _memory_order(tensor: Tensor) -> tuple[list[int], list[int]]:
    order = sorted(range(tensor.ndim), key=lambda axis: -tensor.stride(axis))
    return order, [order.index(axis) for axis in range(tensor.ndim)]


def _zeros(leaf: Tensor) -> Tensor:
    dtype = torch.float64 if leaf.dtype == torch.float64 else torch.float32
    return torch.zeros_like(leaf, dtype=dtype, requires_grad=False)


def _copy(nested: Any) -> Any:
    return {k: _copy(v) for k, v in nested.items()} if isinstance(nested, dict) else nested


def _store(state: State, group: Bucket | RuleGroup, slot: str) -> dict[str, Tensor]:
    if isinstance(group, Bucket):
        return state["momentum"]
    return (state["auxiliary"] if group.name is None else state["auxiliary"][group.name])[slot]


def _pick(leaves: Leaves, paths: Sequence[str]) -> list[Tensor]:
    # Planning has checked that none of these is None.
    return [leaves[path] for path in paths]  # pyright: ignore[reportReturnType]


# ---- the public functions ------------------------------------------------------------------------


def muon(
    lr: Scalar = 1e-3,
    *,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    bias_correction: bool = True,
    weight_decay: Scalar | Callable[[str, Tensor], float] = 0.0,
    orthogonalize: str | Orthogonalizer = NewtonSchulz(),
    scale: str | ScaleRule = "match_rms_adamw",
    auxiliary: Rule | Mapping[str, Rule] = adamw(),
    labels: Mapping[str, Label] | Callable[[str, Tensor], Label | None] | None = None,
    missing: str = "skip",
    max_stack_bytes: int = 2**28,
    differentiable: bool = False,
) -> Transformation:
    """Muon for the matrices and an auxiliary rule for the rest, as pure `init` and `update`.

    lr, momentum and weight_decay are scalars: a number, a 0-d tensor, or a callable of the step.

    Args:
        lr: learning rate, shared by matrices and the other leaves (times the rule's `lr_scale`).
        momentum: decay of the average of the gradients, in [0, 1).
        nesterov: act on the look-ahead of the average, not on the average.
        bias_correction: undo the average's start at zero, as Adam does.
        weight_decay: decoupled, not multiplied by the shape scale: -lr weight_decay W is added. A
            callable (path, tensor) -> number masks it leaf by leaf.
        orthogonalize: a method or its name in `fmuon.orthogonalize.METHODS`.
        scale: name of a rule in `fmuon.scaling.SCALES`, or a callable (fan_out, fan_in) -> float.
            With the default one lr serves all leaves, and a lr tuned for AdamW carries over.
        auxiliary: the rule of every leaf that is no matrix, or a dict name -> rule; a label names
            its rule, and "auxiliary" means the first one.
        labels: what each leaf is, by path: an ordered dict (first match wins; a key is a path, or
            "re:" and a pattern for whole paths), or a callable (path, tensor) -> label or None that
            sees shapes only. A label is a `Matrix`, "muon", "auxiliary" or a rule's name, "frozen",
            or "error". Leaves without a label: a 2-D leaf is a matrix unless a component of its
            path says embedding or head; the rest is auxiliary. `fmuon.label(module)` does better.
        missing: what a gradient of None means: "skip" (leave leaf and state alone), "zero" (as if
            it were zero) or "error".
        max_stack_bytes: how much of the matrices is copied into stacks at a time.
        differentiable: keep the autograd graph through the update.

    Returns:
        A `Transformation`. Its init and update have the signatures of `fmuon.init` and
        `fmuon.update`.

    Raises:
        ConfigurationError: an option has a value that is not allowed.
    """
    if isinstance(labels, Mapping):
        labels = tuple(labels.items())  # pyright: ignore[reportAssignmentType]
    configuration = Muon(
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        bias_correction=bias_correction,
        weight_decay=weight_decay,
        orthogonalize=orthogonalizer(orthogonalize),
        scale=scale_rule(scale),
        auxiliary=auxiliary if isinstance(auxiliary, Rule) else tuple(auxiliary.items()),
        labels=labels,  # pyright: ignore[reportArgumentType]
        missing=missing,
        max_stack_bytes=max_stack_bytes,
        differentiable=differentiable,
    )
    return Transformation(configuration.init, configuration.update)


def configuration_of(opt: Transformation) -> Muon:
    """The configuration whose methods a transformation holds."""
    owner = getattr(opt.update, "__self__", None)
    if not isinstance(owner, Muon):
        raise ConfigurationError(f"{opt!r} was not made by fmuon.muon or a preset")
    return owner


_DEFAULT = muon()


def init(params: Tree, step: int = 0) -> State:
    """The state of the default configuration, `muon()`, for a pytree of tensors.

    Args:
        params: any pytree of tensors; None leaves are frozen. Read only.
        step: how many updates the run has made already, for leaves that join late.

    Returns:
        `{"momentum": {path: T}, "auxiliary": {slot: {path: T}}, "missed": {path: int64 0-d}}`, the
        tensors T with their leaf's shape and strides, float32 (float64 for float64 leaves). With a
        dict of rules, "auxiliary" has a level of rule names above the slots.

    Raises:
        LeafError: a leaf can't be trained as labelled, or no leaf is a matrix.
    """
    return _DEFAULT.init(params, step)


def update(
    grads: Tree, state: State, step: int | Tensor, params: Tree = None, **scalars: Any
) -> tuple[Tree, State]:
    """One step of the default configuration, `muon()`; nothing that is passed in is written.

    Args:
        grads: a pytree with the leaves of the params; None where there is no gradient.
        state: from `init` or the last `update`.
        step: number of updates already applied, an int or a 0-d tensor; 0 on the first call.
        params: needed where weights decay.
        **scalars: `lr`, `weight_decay`, `momentum`, `betas` (a pair) and `eps` for this call in
            place of the configured ones, each a scalar or a flat dict path -> scalar; and
            `present`, a dict path -> 0-d bool tensor: where it is False the leaf is skipped as if
            its gradient were None, within one graph.

    Returns:
        updates, to be added to the params (`apply_updates`): float32 for 16-bit leaves, None for
        leaves that don't move; and the new state.

    Raises:
        StateError: grads, state and configuration don't belong together.
        LeafError: a gradient or param doesn't fit its leaf.
    """
    return _DEFAULT.update(grads, state, step, params, **scalars)


def update_(
    opt: Transformation,
    params: Tree,
    grads: Tree,
    state: State,
    step: int | Tensor,
    **scalars: Any,
) -> None:
    """One step in place: `params` and `state` are overwritten, bucket by bucket; grads are not.

    Same result as `opt.update` and `apply_updates`, with less memory; arguments as there.
    """
    configuration_of(opt).update_(params, grads, state, step, **scalars)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """params + updates, with the structure and dtypes of params; None leaves it as it is.

    16-bit params are added in float32 and rounded once. Unless an update carries an autograd graph
    the new leaves are detached, and outside torch.compile their `requires_grad` is that of the old.
    """
    leaves, structure = flatten(params)
    changes, _ = flatten(updates, "updates")
    if unknown := [path for path in changes if path not in leaves]:
        raise StateError(
            f"updates: {unknown} are no leaves of params; pass the params of the update"
        )
    return structure.rebuild(
        {path: _apply(leaf, changes.get(path)) for path, leaf in leaves.items()}
    )


def _apply(param: Tensor | None, change: Tensor | None) -> Tensor | None:
    if param is None or change is None:
        return param
    if change.requires_grad:
        return (param + change).to(param.dtype)
    new = (param.detach() + change).to(param.dtype)
    # A graph can't return a tensor whose requires_grad was set inside it.
    return new if torch.compiler.is_compiling() else new.requires_grad_(param.requires_grad)
