# SPDX-License-Identifier: Apache-2.0
"""What one call of an update works with: leaves by path, and scalars for any of them.

A weight decay or beta given for all leaves stands in for the configured one; one given in a dict is
that leaf's own. Where a call gives nothing, the configuration's value counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmuon.auxiliary import Rule
from fmuon.base import ConfigurationError, State, StateError, Tree
from fmuon.buckets import Bucket
from fmuon.clipping import all_finite
from fmuon.collectives import anywhere, block_of, everywhere, local, register_meshes
from fmuon.lowbit import decode, encode
from fmuon.metrics import METRICS, SKIPPED, metric_key
from fmuon.planning import (
    MANTISSA,
    MOMENTUM,
    SCALE,
    SECOND,
    Configuration,
    Plan,
    RuleGroup,
    masked_decay,
    plan_update,
    signature,
)
from fmuon.rounding import joined, leaf_key, noise
from fmuon.scalars import check_scalar, is_callable, is_zero, resolve
from fmuon.tree import flatten

Leaves: TypeAlias = Mapping[str, Tensor | None]
Group: TypeAlias = Bucket | RuleGroup


class Call:
    """The arguments of one update, resolved; `plan` says who is updated with whom."""

    def __init__(
        self,
        config: Configuration,
        grads: Tree,
        state: State,
        step: int | Tensor,
        params: Tree,
        *,
        betas: Any,
        present: Mapping[str, Any] | None,
        found_inf: Tensor | None,
        **scalars: Any,
    ) -> None:
        _check_structure(config, state)
        self.config = config
        # As they were given; everything is computed with the local tensors of shards.
        self.given_state = state
        self.given_grads, self.structure = flatten(grads, "grads")
        self.given_params: Leaves | None = None if params is None else flatten(params)[0]
        if not torch.compiler.is_compiling():
            register_meshes(self.given_grads.values(), (self.given_params or {}).values())
        self.state: State = _locals(state)
        self.grads: Leaves = _locals(self.given_grads)
        self.params: Leaves | None = _locals(self.given_params)
        self.step = (
            step
            if isinstance(step, Tensor)
            else torch.full((), step, dtype=torch.int64, device="cpu")
        )
        self.present: Mapping[str, Any] = {} if present is None else present
        scalars["beta1"], scalars["beta2"] = _split(betas)
        self.given: dict[str, Any] = {k: v for k, v in scalars.items() if v is not None}
        for path, flag in self.present.items():
            if not isinstance(flag, Tensor) or flag.dtype != torch.bool or flag.ndim:
                raise ConfigurationError(f"present[{path!r}]={flag!r}: give a 0-d bool tensor")
        if found_inf is not None and (not isinstance(found_inf, Tensor) or found_inf.ndim):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"found_inf={found_inf!r}: give a 0-d tensor")
        self.found_inf = found_inf
        self.finite: Tensor | None = None
        self.defaults: dict[str, Any] = {
            "lr": config.lr,
            "momentum": config.momentum,
            "weight_decay": config.weight_decay,
        }
        # Stronger than the decay of a rule; the leaves of a mask are not.
        self.decays_by_leaf = isinstance(self.given.get("weight_decay"), Mapping)
        # Everything that user code says is asked for here, before anything is computed.
        for values in (self.given, self.defaults):
            for name, value in values.items():
                values[name] = self._evaluated(name, value)
        self.own_rates = {
            name: self._evaluated("lr", rule.lr)
            for name, rule in config.rules.items()
            if rule.lr is not None
        }

    def _evaluated(self, name: str, value: Any) -> Any:
        """A scalar without callables: masks by leaf, schedules at this step."""
        if isinstance(value, Mapping):
            entries: Mapping[str, Any] = value
            return {path: self._evaluated(f"{name}[{path!r}]", v) for path, v in entries.items()}
        check_scalar(name, value)
        if not is_callable(value):
            return value
        by_leaf = None
        if name == "weight_decay":
            by_leaf = masked_decay(value, signature(self.given_params or {}))
        value = value(self.step) if by_leaf is None else dict(by_leaf)
        if is_callable(value) or value is None:
            raise ConfigurationError(f"{name}: its callable returned {value!r}, which is no scalar")
        return self._evaluated(name, value)

    # ---- planning --------------------------------------------------------------------------------

    def plan(self, *, in_place: bool = False) -> Plan:
        """The plan of this call; raises where its arguments don't fit together."""
        plan = self._plan(in_place)
        self.present = {**self.present, **self._present_anywhere(plan)}
        self.finite = finite = self._is_finite(plan)
        if finite is not None:
            # In a step that isn't finite every leaf sits out, as if it had no gradient.
            present = self.present
            self.present = {
                path: present[path] & finite.to(present[path].device) if path in present else finite
                for path in self.state["missed"]
            }
        return plan

    def _present_anywhere(self, plan: Plan) -> dict[str, Tensor]:
        """Whether any rank has a gradient, for leaves that several share."""
        found: dict[str, Tensor] = {}
        for ranks, paths, device in plan.shared if self.config.missing == "skip" else ():
            here = torch.tensor([self.grads[path] is not None for path in paths], device=device)
            flags = self._flags(paths)
            here = here if flags is None else here & flags.to(device)
            found |= dict(zip(paths, anywhere(here, ranks, device).unbind(), strict=True))
        return found

    def _is_finite(self, plan: Plan) -> Tensor | None:
        """Whether this step counts, on the device; None where nothing can forbid it."""
        finite = None if self.found_inf is None else self.found_inf == 0
        if self.config.nonfinite == "skip":
            grads = {path: self.grads[path] for path in self.state["missed"]}
            own = all_finite(self._seen(g, path) for path, g in grads.items() if g is not None)
            finite = own if finite is None else own & finite.to(own.device)
        if finite is None:
            return None
        for ranks, _, device in plan.shared:
            finite = everywhere(finite, ranks, device)
        return finite

    def _plan(self, in_place: bool) -> Plan:
        kept = [name for name in (MOMENTUM, SCALE, SECOND, MANTISSA) if name in self.state]
        slots: Mapping[str, Any] = self.given_state["auxiliary"]
        by_rule: Any = {None: slots} if isinstance(self.config.auxiliary, Rule) else slots
        return plan_update(
            self.config,
            signature(self.given_grads),
            tuple((name, signature(self.given_state[name])) for name in kept),
            tuple(
                (name, slot, signature(leaves))
                for name, store in by_rule.items()
                for slot, leaves in store.items()
            ),
            signature(self.state["missed"]),
            None if self.given_params is None else signature(self.given_params),
            self._named(),
            self._decays(),
            in_place,
        )

    def _named(self) -> tuple[tuple[str, str], ...]:
        """(option, path) of every leaf that a dict of this call names."""
        options = {**self.given, "present": self.present}
        return tuple(
            (option, path)
            for option, value in options.items()
            if isinstance(value, Mapping)
            for path in value
        )

    def _decays(self) -> bool:
        """Whether weights decay: only the Python constant 0 says that none does."""
        own = [rule.weight_decay or 0 for rule in self.config.rules.values()]
        inherited = self.given.get("weight_decay", self.config.weight_decay)
        return not all(is_zero(decay) for decay in (inherited, *own))

    # ---- scalars ---------------------------------------------------------------------------------

    def rule(self, group: Group) -> Rule | None:
        """The auxiliary rule of a group; None for matrices."""
        # Not kept in the plan: dynamo can't look up a function in a constant that it was handed.
        return None if isinstance(group, Bucket) else self.config.rules[group.name]

    def of(
        self, option: str, paths: Sequence[str], device: torch.device, default: Any = None
    ) -> Tensor:
        """An option for some leaves: float64, 0-d or one entry per path."""
        default = self.defaults.get(option, default)
        return resolve(self.given.get(option, default), default, paths, device)

    def rate(self, group: Group) -> Tensor:
        """The learning rate of the leaves of a group."""
        if isinstance(group, Bucket):
            return self.of("lr", group.paths, group.device)
        if group.name in self.own_rates:
            # A rate for all leaves is that of the matrices; one in a dict is the leaf's own.
            own, given = self.own_rates[group.name], self.given.get("lr")
            value = given if isinstance(given, Mapping) else own
            return resolve(value, own, group.paths, group.device)
        rate = self.of("lr", group.paths, group.device)
        return rate * self.config.rules[group.name].lr_scale

    def decay(self, group: Group) -> Tensor | None:
        """The weight decay of the leaves of a group; None where it is the constant 0."""
        default = self.defaults["weight_decay"]
        value = self.given.get("weight_decay", default)
        rule = self.rule(group)
        if rule is not None and rule.weight_decay is not None:
            default = rule.weight_decay
            value = value if self.decays_by_leaf else default
        if is_zero(value):
            return None
        return resolve(value, default, group.paths, group.device)

    def count(self, paths: Sequence[str], device: torch.device) -> Tensor:
        """t of every leaf: its updates including this one, float64."""
        missed = torch.stack([self.state["missed"][path] for path in paths])
        return (self.step - missed + 1).to(device=device, dtype=torch.float64)

    # ---- tensors ---------------------------------------------------------------------------------

    def masked(self, new: Tensor, paths: Sequence[str], old: Tensor) -> Tensor:
        """The new stack, but the old one for leaves whose gradient is not present."""
        here = self._flags(paths)
        return new if here is None else torch.where(spread(here.to(new.device), new), new, old)

    def kept(self, new: Tensor, path: str, old: Tensor) -> Tensor:
        """The new tensor of a leaf, but the old one where its gradient is not present."""
        flag = self.present.get(path)
        return new if flag is None else torch.where(flag.to(new.device), new, old)

    def _flags(self, paths: Sequence[str]) -> Tensor | None:
        """Whether the gradients of some leaves are present, [k]; None where nothing says it."""
        if not any(path in self.present for path in paths):
            return None
        always = torch.ones((), dtype=torch.bool, device=self.step.device)
        return torch.stack([self.present.get(path, always) for path in paths])

    def _seen(self, grad: Tensor, path: str) -> Tensor:
        """A gradient, zero where it is not present."""
        if path not in self.present:
            return grad
        return torch.where(self.present[path].to(grad.device), grad, 0)

    def moved(self, update: Tensor, path: str) -> Tensor:
        """The update of a leaf, zero where its gradient is not present."""
        if path not in self.present:
            return update
        # Adding 0.0 would turn a weight of -0.0 into 0.0.
        return torch.where(self.present[path].to(update.device), update, -0.0)

    def measured(self, name: str, path: str, value: Tensor) -> tuple[str, Tensor]:
        """(key, value) of a metric of a leaf; the old value where its gradient is not present."""
        name, value = metric_key(name, path), value.detach().to(torch.float32)
        if path in self.present:
            old = self.state.get("metrics", {}).get(name, torch.zeros_like(value))
            value = torch.where(self.present[path].to(value.device), value, old)
        return name, value

    def skipped_steps(self) -> dict[str, Tensor]:
        """The count of steps that were not finite, where it is asked for."""
        if SKIPPED not in self.config.metrics:
            return {}
        count = self.state.get("metrics", {}).get(metric_key(SKIPPED), torch.zeros(()))
        finite = torch.ones_like(count) if self.finite is None else self.finite.to(count.device)
        return {metric_key(SKIPPED): METRICS[SKIPPED].compute(count, finite)}

    def flagged(self, plan: Plan) -> list[str]:
        """Leaves with a gradient whose presence a flag decides."""
        return [path for path in self.present if path not in plan.idle]

    def store(self, group: Group, slot: str, state: State | None = None) -> dict[str, Tensor]:
        """Path -> tensor of one slot of a group, in the state of this call or another."""
        held: State = self.state if state is None else state
        if isinstance(group, Bucket) or slot == MANTISSA:
            return held[slot]
        return (held["auxiliary"] if group.name is None else held["auxiliary"][group.name])[slot]

    def gradient(self, path: str, like: Tensor) -> Tensor:
        """A gradient; None, which planning lets through only for missing="zero", as zeros."""
        grad = self.grads[path]
        if grad is None:
            return torch.zeros_like(like)
        # What comes of a NaN is thrown away, but its derivative would still be NaN.
        return self._seen(grad, path) if self.config.differentiable else grad

    def weights(self, group: Group) -> list[Tensor]:
        """The params of a group; planning has checked that they are there."""
        assert self.params is not None
        return [self.params[path] for path in group.paths]  # pyright: ignore[reportReturnType]

    def full_weights(self, group: Group) -> list[Tensor]:
        """The same in the dtype of the group, with the bits that a mantissa keeps."""
        kept = self.state.get(MANTISSA, {})
        return [
            (joined(weight, kept[path]) if path in kept else weight).to(group.dtype)
            for path, weight in zip(group.paths, self.weights(group), strict=True)
        ]

    def momentum(self, path: str) -> Tensor:
        """The momentum of a matrix leaf, out of 8 bits where it is kept in them."""
        held, name = self.state[MOMENTUM][path], self.config.momentum_dtype
        return decode(name, held, self.state[SCALE][path]) if isinstance(name, str) else held

    def stored(
        self, paths: Sequence[str], new: Tensor, old: Tensor
    ) -> dict[str, dict[str, Tensor]]:
        """Averages [k, ...] as the state keeps them, by slot and path, the old ones if absent."""
        name = self.config.momentum_dtype
        if not isinstance(name, str):
            kept = self.masked(new, paths, old).unbind()
            return {MOMENTUM: dict(zip(paths, kept, strict=True))}
        found: dict[str, dict[str, Tensor]] = {MOMENTUM: {}, SCALE: {}}
        for path, momentum in zip(paths, new.unbind(), strict=True):
            pair = encode(name, momentum, tuple(self.state[SCALE][path].shape))
            for slot, tensor in zip(found, pair, strict=True):
                found[slot][path] = self.kept(tensor, path, self.state[slot][path])
        return found

    def rounding_noise(self, path: str, count: Tensor) -> Tensor:
        """The random bits that round a leaf in its update of that number."""
        assert self.config.rounding is not None and self.given_params is not None
        leaf: Any = self.given_params[path]
        key = leaf_key(self.config.rounding.seed, path)
        return noise(key, count, tuple(leaf.shape), block_of(path, leaf))

    def whole(self, path: str) -> Any:
        """A tensor of a leaf as it was given, which says how a result is sharded."""
        for leaves in (self.given_params or {}, self.given_grads, self.given_state["momentum"]):
            if leaves.get(path) is not None:
                return leaves[path]
        return None


def _check_structure(config: Configuration, state: Any) -> None:
    """Refuse what isn't a dict of dicts of tensors as init makes it; planning looks at the rest."""
    given: Any = state if isinstance(state, Mapping) else {}
    if absent := {*config.stores} - set(given):
        raise StateError(
            f"no state of fmuon for this opt: it has the keys {sorted(map(str, given))} and lacks "
            f"{sorted(absent)}; make it with init"
        )
    stores = {(name,): given[name] for name in config.stores if name != "auxiliary"}
    slots: Any = {("auxiliary",): given["auxiliary"]}
    # Slots of the rule, or rules and their slots.
    for _ in range(1 if isinstance(config.auxiliary, Rule) else 2):
        slots = {
            (*keys, key): value
            for keys, entries in slots.items()
            for key, value in _entries(keys, entries)
        }
    for keys, leaves in (*stores.items(), *slots.items()):
        for path, tensor in _entries(keys, leaves):
            if not isinstance(tensor, Tensor):
                raise StateError(
                    f"{path!r}: the state's {'.'.join(map(str, keys))} holds a "
                    f"{type(tensor).__name__} for it, which should be a tensor; make the state "
                    f"with init"
                )


def _entries(keys: tuple[str, ...], entries: Any) -> Sequence[tuple[str, Any]]:
    if not isinstance(entries, Mapping):
        raise StateError(
            f"no state of fmuon: {'.'.join(map(str, keys))} is a {type(entries).__name__}, which "
            f"should be a dict; make it with init"
        )
    return [*entries.items()]


def _locals(tree: Any) -> Any:
    """Flat or nested dicts with the local tensors of shards."""
    if isinstance(tree, Mapping):
        return {key: _locals(value) for key, value in tree.items()}
    return local(tree)


def spread(values: Tensor, stack: Tensor) -> Tensor:
    """[k] -> [k, 1, ...], to broadcast over the members of a stack [k, ...]; 0-d stays."""
    return values.reshape(-1, *[1] * (stack.ndim - 1)) if values.ndim else values


def _split(betas: Any) -> tuple[Any, Any]:
    if isinstance(betas, Mapping):
        pairs: Mapping[str, Any] = betas
        return tuple({path: _split(pair)[i] for path, pair in pairs.items()} for i in (0, 1))  # pyright: ignore[reportReturnType]
    if betas is None:
        return None, None
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigurationError(f"betas={betas!r}: give a pair, or a dict path -> pair")
    return betas[0], betas[1]
