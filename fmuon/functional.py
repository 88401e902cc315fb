# SPDX-License-Identifier: Apache-2.0
"""The algorithm: `muon`, `init`, `update`, `update_` and `apply_updates`.

One step of a matrix leaf with gradient G, momentum M and weight W: average and look ahead
(`momentum`), gather the matrix views of equal shape in stacks (`buckets`), orthogonalise each stack
(`orthogonalize`), where asked for even out the factor (`second_moment`), go back to the leaf's
shape, and add

    -lr (scale O + weight_decay W)                       [Liu et al. 2025, arXiv 2502.16982, eq. 3]

The other leaves follow a rule of `auxiliary`. Who is stacked with whom is decided in `planning`;
everything here computes.
"""

import contextlib
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmuon.auxiliary import Rule, adamw
from fmuon.balance import EQUILIBRATIONS, RENORMALIZATIONS
from fmuon.base import (
    ConfigurationError,
    LeafError,
    Matrix,
    Scalar,
    Stack,
    State,
    StateError,
    Transformation,
    Tree,
    is_transformed,
)
from fmuon.buckets import Bucket, MatrixLeaf, StackPlan, stack, unstack
from fmuon.call import Call, Group, spread
from fmuon.clipping import refuses_clipping
from fmuon.collectives import (
    arrived,
    beside,
    check_agreement,
    has_copies_to_make,
    like,
    local,
    make_group,
    parts_of,
    register,
    register_meshes,
    returned,
    to_owners,
    to_parts,
    to_replicas,
)
from fmuon.decay import DECAYS
from fmuon.lowbit import FORMATS, own_scale_shape, scale_shape
from fmuon.methods import chosen, orthogonalizer
from fmuon.metrics import METRICS
from fmuon.momentum import average, look_ahead
from fmuon.orthogonalize import NewtonSchulz, Orthogonalizer
from fmuon.partition import Assignment, Label
from fmuon.planning import (
    MANTISSA,
    MOMENTUM,
    SCALE,
    SECOND,
    Configuration,
    RuleGroup,
    Spec,
    check_not_empty,
    matrix_leaf,
    sharding_of,
    signature,
)
from fmuon.rounding import Stochastic, is_rounded, rounding_method, split
from fmuon.scalars import Scalars
from fmuon.scaling import ScaleRule, scale_rule
from fmuon.second_moment import SecondMoment, second_moment_method
from fmuon.sharding import Exchange, Mesh, Sharding, Split
from fmuon.surgery import entries, origins, resized
from fmuon.tree import flatten


class Muon(Configuration):
    """The configuration behind a `Transformation`; make one with `muon`."""

    def init(self, params: Tree, step: int = 0) -> State:
        """The state of leaves that have seen no update; see `fmuon.init`."""
        leaves, _ = flatten(params)
        nested = not isinstance(self.auxiliary, Rule)
        slots = {name: {slot: {} for slot in rule.slots} for name, rule in self.rules.items()}
        state: State = {name: {} for name in self.stores}
        state["auxiliary"] = slots if nested else slots[None]
        assignments = self.assign(leaves)
        if not isinstance(params, list | tuple):
            check_not_empty(assignments)
        if not torch.compiler.is_compiling():
            self._prepare(leaves, assignments)
        for path, (label, _, _) in assignments.items():
            leaf = leaves[path]
            if leaf is None or label == "frozen":
                continue
            state["missed"][path] = torch.full((), step, dtype=torch.int64, device=leaf.device)
            store = state if isinstance(label, Matrix) else slots[self.rule_name(label)]
            for slot, zeros in self.fresh(path, leaf, label).items():
                (state if slot == MANTISSA else store)[slot][path] = zeros
        if self.metrics:
            leaves_of_state = ((p, p in state["momentum"]) for p in state["missed"])
            device = next((m.device for m in state["missed"].values()), None)
            state["metrics"] = {
                key: torch.zeros((), device=device) for key in self.metric_keys(leaves_of_state)
            }
        return state

    def prepare(self, params: Tree) -> None:
        """Make what an update of sharded leaves needs; see `fmuon.distributed.prepare`."""
        leaves, _ = flatten(params)
        self._prepare(leaves, self.assign(leaves))

    def shared_leaves(
        self,
        leaves: Mapping[str, Tensor | None],
        assignments: Mapping[str, Assignment],
        mesh: Mesh | None = None,
    ) -> list[MatrixLeaf]:
        """The matrix leaves that several ranks share the work for.

        With a mesh those that `fully_shard` would share on it: rows cut along its last dimension,
        copies along the others.
        """
        register_meshes(leaves.values())
        specs = {path: Spec(*spec) for path, spec in signature(leaves) if spec is not None}

        def cut(spec: Spec) -> Sharding | None:
            if mesh is None or spec.sharding is not None:
                return None
            return Sharding(spec.shape, mesh, (None,) * (len(mesh.shape) - 1) + (Split(0),))

        found = [
            matrix_leaf(self, path, label, specs[path], torch.float32, cut(specs[path]))
            for path, (label, _, _) in assignments.items()
            if isinstance(label, Matrix) and 0 not in specs[path].shape
        ]
        return [leaf for leaf in found if leaf.domain is not None]

    def _prepare(
        self, leaves: Mapping[str, Tensor | None], assignments: Mapping[str, Assignment]
    ) -> None:
        register_meshes(leaves.values())
        specs = {
            path: Spec(*spec)
            for path, spec in signature(leaves)
            if spec is not None and assignments[path].label != "frozen"
        }
        groups: list[tuple[int, ...]] = []
        described: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for path, spec in sorted(specs.items()):
            label, sharding = assignments[path].label, sharding_of(self, spec)
            if sharding is None:
                continue
            ranks = tuple(sorted(sharding.mesh.ranks))
            groups.append(ranks)
            described[ranks].append(f"{path}: {spec.shape} {spec.dtype} {sharding.splits} {label}")
            if isinstance(label, Matrix) and 0 not in spec.shape:
                domain = matrix_leaf(self, path, label, spec, torch.float32).domain
                groups += () if domain is None else (domain.parts, domain.copies)
        for ranks in groups:
            make_group(ranks)
        for ranks, lines in described.items():
            check_agreement([*map(str, self.agreed), *lines], ranks)

    def fresh(self, path: str, leaf: Tensor, label: Label) -> dict[str, Tensor]:
        """What the state holds of one leaf before its first update, by slot."""
        fresh: dict[str, Tensor] = {}
        if isinstance(label, Matrix):
            fresh = self._fresh_momentum(path, leaf)
            shapes = self.kept_shapes(path, label.view(path, tuple(leaf.shape)))
            if SECOND in shapes:
                whole, own = shapes[SECOND], local(leaf)
                sides = zip(whole, leaf.shape, own.shape, strict=True)
                kept = [mine if side == length else side for side, length, mine in sides]
                fresh[SECOND] = beside(_zeros(own.new_empty(kept)), leaf, whole)
        else:
            rule = self.rules[self.rule_name(label)]
            fresh = {s: _zeros(leaf, rule.mu_dtype if s == "mu" else None) for s in rule.slots}
        if self.has_mantissa(path, leaf.dtype):
            own = torch.zeros((*local(leaf).shape, 2), dtype=torch.uint8, device=leaf.device)
            fresh[MANTISSA] = beside(own, leaf, (*leaf.shape, 2))
        return fresh

    def _fresh_momentum(self, path: str, leaf: Tensor) -> dict[str, Tensor]:
        if not isinstance(self.momentum_dtype, str):
            return {MOMENTUM: _zeros(leaf, self.momentum_dtype)}
        shape, parts = tuple(leaf.shape), parts_of(leaf)
        scales = scale_shape(path, shape, parts)
        own = own_scale_shape(scales, shape, tuple(local(leaf).shape), parts)
        return {
            MOMENTUM: _zeros(leaf, FORMATS[self.momentum_dtype].codes),
            SCALE: beside(torch.zeros(own, device=leaf.device), leaf, scales),
        }

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
        found_inf: Tensor | None = None,
    ) -> tuple[Tree, State]:
        """What to add to the params, and the new state; see `fmuon.update`."""
        with contextlib.nullcontext() if self.differentiable else torch.no_grad():
            call = Call(
                self, grads, state, step, params, lr=lr, weight_decay=weight_decay,
                momentum=momentum, betas=betas, eps=eps, present=present, found_inf=found_inf,
            )  # fmt: skip
            plan = call.plan()
            new = {name: _copy(state[name]) for name in state}
            updates: dict[str, Tensor] = {}
            metrics: dict[str, Tensor] = {}
            for group, moved in _moves(plan.groups, call):
                metrics |= _measured(group, call, moved)
                moved = _rounded(moved, group, call)
                for path, change in zip(group.paths, moved.updates, strict=True):
                    change = _strided(change, call.state["momentum"].get(path))
                    updates[path] = like(change, call.whole(path))
                for slot, tensors in moved.slots.items():
                    old, store = call.store(group, slot), call.store(group, slot, new)
                    for path, tensor in tensors.items():
                        keep = _strided if _is_alone(group, path) else _owned
                        kept = keep(tensor, old[path]).to(old[path].dtype)
                        store[path] = like(kept, store[path])
            for path in plan.empty:
                updates[path] = _zeros(state[MOMENTUM][path])
            for path in plan.idle:
                new["missed"][path] = state["missed"][path] + 1
            for path in call.flagged(plan):
                absent = call.present[path].logical_not()
                new["missed"][path] = state["missed"][path] + absent
            if self.metrics:
                new["metrics"] = new.get("metrics", {}) | metrics | call.skipped_steps()
            return call.structure.rebuild(updates), new

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
        found_inf: Tensor | None = None,
    ) -> None:
        """Write the new params and state over the old ones; see `fmuon.update_`."""
        call = Call(
            self, grads, state, step, params, lr=lr, weight_decay=weight_decay,
            momentum=momentum, betas=betas, eps=eps, present=present, found_inf=found_inf,
        )  # fmt: skip
        plan = call.plan(in_place=True)
        for path, weight in (call.params or {}).items():
            if weight is not None and 0 in weight.stride() and not _is_writable(weight):
                raise LeafError(f"{path!r}: an expanded tensor can't be written; pass a copy")
        metrics: dict[str, Tensor] = {}
        for group, moved in _moves(plan.groups, call):
            metrics |= _measured(group, call, moved)
            moved = _rounded(moved, group, call)
            torch._foreach_add_(call.weights(group), moved.updates)
            for slot, tensors in moved.slots.items():
                store = call.store(group, slot)
                torch._foreach_copy_([store[path] for path in tensors], [*tensors.values()])
        for path in plan.idle:
            state["missed"][path].add_(1)
        for path in call.flagged(plan):
            state["missed"][path].add_(call.present[path].logical_not())
        if self.metrics:
            old = state.setdefault("metrics", {})
            for name, value in (metrics | call.skipped_steps()).items():
                if name in old:
                    old[name].copy_(value)
                else:
                    old[name] = value


class _Moved(NamedTuple):
    """What a step does to a group of leaves; nothing is written yet.

    `slots` are the new ones, by path. `factors` are what `orthogonalize` made of the stacks of a
    bucket, and `rates` what multiplies them, or the directions of a rule.
    """

    updates: list[Tensor]
    slots: dict[str, dict[str, Tensor]]
    factors: list[Stack]
    rates: list[Tensor]


class _Sent(NamedTuple):
    """A bucket whose leaves are on their way to their owners, or back.

    What is carried are the look-aheads, or the updates, and the second moments where there are any.
    """

    bucket: Bucket
    exchange: Exchange
    carried: list[list[Tensor]]
    slots: dict[str, dict[str, Tensor]]
    pending: list[Tensor | None]


def _moves(groups: Sequence[Group], call: Call) -> Iterator[tuple[Group, _Moved]]:
    """Every group with its step.

    While a bucket that is shared with other ranks is computed, the leaves of the next are on their
    way to their owners, those of the last on their way back, and those of the one before that on
    their way to the replicas, if there are any.
    """
    shared = [(g, g.exchange) for g in groups if isinstance(g, Bucket) and g.exchange is not None]
    coming = _sent(*shared[0], call) if shared else None
    for group in groups:
        if not isinstance(group, Bucket):
            yield group, _settled(_others(group, call), group, call)
        elif group.exchange is None:
            yield group, _settled(_matrices(group, call), group, call)
    going: _Sent | None = None
    copying: _Sent | None = None
    for following in [*shared[1:], None, None, None]:
        here, coming = coming, _sent(*following, call) if following else None
        done = None if here is None else _sent_back(here, call)
        if copying is not None:
            yield copying.bucket, _settled(_returned(copying, call), copying.bucket, call)
        copying = None
        if going is not None and has_copies_to_make(going.exchange):
            copying = _sent_on(going)
        elif going is not None:
            yield going.bucket, _settled(_returned(going, call), going.bucket, call)
        going = done


def _sent(bucket: Bucket, exchange: Exchange, call: Call) -> _Sent:
    looks, slots = _averaged(bucket, call)
    carried = [looks, *_second_moments(bucket, call, looks)]
    return _Sent(
        bucket, exchange, carried, slots, [to_owners(exchange, tensors) for tensors in carried]
    )


def _sent_back(here: _Sent, call: Call) -> _Sent:
    """Orthogonalise what has arrived and send it back."""
    pairs = zip(here.pending, here.carried, strict=True)
    looks, *moments = [arrived(here.exchange, pending, parts) for pending, parts in pairs]
    moved, moments = _orthogonalized(here.bucket, looks, moments, call)
    kinds = zip([moved.updates, *moments], here.carried, strict=True)
    return here._replace(pending=[to_parts(here.exchange, whole, own[0]) for whole, own in kinds])


def _sent_on(here: _Sent) -> _Sent:
    """Give the replicas what has come back."""
    kinds = zip(here.pending, here.carried, strict=True)
    sent = [
        to_replicas(here.exchange, pending, own[0]) for pending, own in kinds if pending is not None
    ]
    return here._replace(pending=sent)


def _returned(here: _Sent, call: Call) -> _Moved:
    updates, *moments = [returned(here.exchange, p) for p in here.pending if p is not None]
    return _Moved(updates, here.slots | _kept_moments(here.bucket, moments, call), [], [])


def _settled(moved: _Moved, group: Group, call: Call) -> _Moved:
    """With weight decay, and zero where a leaf sits the step out."""
    updates = moved.updates
    decay = call.decay(group)
    if decay is not None:
        power, cautious = DECAYS[call.config.decay]
        c = (-decay * call.rate(group) ** power).to(group.dtype)
        factors = c.unbind() if c.ndim else [c] * len(updates)
        triples = zip(updates, call.full_weights(group), factors, strict=True)
        updates = [_decayed(u, w, c, cautious) for u, w, c in triples]
    updates = [call.moved(u, path) for u, path in zip(updates, group.paths, strict=True)]
    return moved._replace(updates=updates)


def _decayed(update: Tensor, weight: Tensor, factor: Tensor, cautious: bool) -> Tensor:
    """The update and factor W; cautious: only where it doesn't work against the update."""
    aligned = torch.where(update * weight <= 0, weight, 0) if cautious else weight
    return torch.addcmul(update, aligned, factor)


def _rounded(moved: _Moved, group: Group, call: Call) -> _Moved:
    """With updates to values that leaves of 16 bits hold, and the bits that these don't."""
    rounding = call.config.rounding
    if rounding is None and call.config.master is None:
        return moved
    weights, counts = call.weights(group), call.count(group.paths, group.device).unbind()
    entries = zip(
        group.paths, moved.updates, weights, call.full_weights(group), counts, strict=True
    )
    updates: list[Tensor] = []
    mantissas: dict[str, Tensor] = {}
    for path, update, weight, full, count in entries:
        if is_rounded(weight.dtype):
            new = (full + update).to(torch.float32)
            if rounding is None:
                new, mantissa = split(new)
                mantissas[path] = call.kept(mantissa, path, call.state[MANTISSA][path])
            else:
                new = rounding(new, weight.dtype, call.rounding_noise(path, count))
            updates.append(call.moved(new - weight.to(torch.float32), path))
        else:
            updates.append(update)
    slots = moved.slots | ({MANTISSA: mantissas} if mantissas else {})
    return moved._replace(updates=updates, slots=slots)


def _measured(group: Group, call: Call, moved: _Moved) -> dict[str, Tensor]:
    """The metrics of the leaves of a group, by key."""
    found: dict[str, Tensor] = {}
    for name in call.config.metrics:
        metric = METRICS[name]
        if metric.source == "step":
            continue
        if metric.source == "leaf":
            weights = call.weights(group) if metric.needs_params else moved.updates
            pairs = zip(moved.updates, weights, strict=True)
            values = dict(zip(group.paths, [metric.compute(u, w) for u, w in pairs], strict=True))
        else:
            stacks = moved.factors if metric.source == "stack" else moved.rates
            values = _means(group, [metric.compute(entry) for entry in stacks])
        found |= dict(call.measured(name, path, value) for path, value in values.items())
    return found


def _means(group: Group, values: list[Tensor]) -> dict[str, Tensor]:
    """Leaf by leaf the mean over its matrices of values per stack, each [k] or 0-d."""
    stacks = [spec.paths for spec in group.stacks] if isinstance(group, Bucket) else [group.paths]
    by_leaf: dict[str, list[Tensor]] = defaultdict(list)
    for paths, value in zip(stacks, values, strict=False):
        for path, entry in zip(paths, value.expand(len(paths)).unbind(), strict=True):
            by_leaf[path].append(entry)
    return {path: torch.stack(entries).mean() for path, entries in by_leaf.items()}


def _matrices(bucket: Bucket, call: Call) -> _Moved:
    """-lr scale O and M' of the leaves of a bucket."""
    looks, slots = _averaged(bucket, call)
    moved, moments = _orthogonalized(bucket, looks, _second_moments(bucket, call, looks), call)
    return moved._replace(slots=slots | _kept_moments(bucket, moments, call))


def _averaged(bucket: Bucket, call: Call) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    """The look-ahead U of the leaves of a bucket, and the average M' as the state keeps it."""
    config, device = call.config, bucket.device
    looks: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for paths in bucket.groups:
        momentum = [call.momentum(path) for path in paths]
        grads = [call.gradient(path, m) for path, m in zip(paths, momentum, strict=True)]
        grad, moment = _stacked(grads).to(bucket.dtype), _stacked(momentum).to(bucket.dtype)
        t = spread(call.count(paths, device), grad)
        b = spread(call.of("momentum", paths, device), grad)
        new = average(moment, grad, b)
        look = look_ahead(
            new, grad, b, t, nesterov=config.nesterov, bias_correction=config.bias_correction
        )
        looks.update(zip(paths, look.unbind(), strict=True))
        for slot, tensors in call.stored(paths, new, moment).items():
            slots[slot].update(tensors)
    return [looks[path] for path in bucket.paths], dict(slots)


def _second_moments(bucket: Bucket, call: Call, looks: list[Tensor]) -> list[list[Tensor]]:
    """Those of the leaves of a bucket, spread over their shapes; none where none are kept."""
    if call.config.second_moment is None:
        return []
    pairs = zip(bucket.paths, looks, strict=True)
    held = call.state[SECOND]
    return [[held[path].to(look.dtype).expand(look.shape) for path, look in pairs]]


def _kept_moments(
    bucket: Bucket, moments: list[list[Tensor]], call: Call
) -> dict[str, dict[str, Tensor]]:
    """The same as the state keeps them."""
    kept: dict[str, Tensor] = {}
    for path, moment in zip(bucket.paths, *moments, strict=True) if moments else ():
        own = moment[tuple(slice(side) for side in call.state[SECOND][path].shape)]
        # A copy, with the strides of a fresh one: a view would keep the stack alive.
        kept[path] = own.clone(memory_format=torch.contiguous_format)
    return {SECOND: kept} if kept else {}


def _orthogonalized(
    bucket: Bucket, looks: list[Tensor], moments: list[list[Tensor]], call: Call
) -> tuple[_Moved, list[list[Tensor]]]:
    """-lr scale O of the leaves that this rank has whole, one orthogonalisation per stack.

    And the new second moments of those leaves.
    """
    config, device = call.config, bucket.device
    stacks = stack(bucket, looks)
    orthogonal: list[Stack] = []
    for spec, matrices in zip(bucket.stacks, stacks, strict=True):
        method = chosen(
            config.orthogonalize, spec.total, spec.short, spec.long, bucket.dtype, device
        )
        # In parts: a method may need several times the memory of what it is given.
        if config.equilibrate is None:
            balanced = matrices
        else:
            balanced = EQUILIBRATIONS[config.equilibrate](matrices, _tall(spec))
        parts = [method(part) for part in balanced.split(spec.chunk)]
        orthogonal.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    factors = orthogonal
    if config.renormalize is not None:
        renormalized = RENORMALIZATIONS[config.renormalize]
        pairs = zip(bucket.stacks, orthogonal, strict=True)
        factors = [renormalized(factor, _tall(spec)) for spec, factor in pairs]
    if config.second_moment is not None:
        factors, new = _evened(bucket, factors, moments[0], call, config.second_moment)
        moments = [new]
    duals = _duals(bucket, stacks, factors) if config.adaptive else None
    updates: list[Stack] = []
    rates: list[Tensor] = []
    for spec, factor in zip(bucket.stacks, factors, strict=True):
        rate = call.of("lr", spec.paths, device) * _constant(spec.scales, device)
        if duals is not None:
            rate = rate * torch.stack([duals[path] for path in spec.paths])
        rates.append(rate)
        updates.append(factor * spread(-rate, factor).to(bucket.dtype))
    return _Moved(unstack(bucket, updates), {}, orthogonal, rates), moments


def _evened(
    bucket: Bucket, factors: list[Stack], moments: list[Tensor], call: Call, method: SecondMoment
) -> tuple[list[Stack], list[Tensor]]:
    """The factors evened out by their second moments, and the new moments of the leaves."""
    even: list[Stack] = []
    new: list[Stack] = []
    for spec, factor, moment in zip(bucket.stacks, factors, stack(bucket, moments), strict=True):
        t = spread(call.count(spec.paths, bucket.device), factor)
        evened, averaged = method(factor, moment, t, _tall(spec))
        even.append(evened)
        new.append(call.masked(averaged, spec.paths, moment))
    return even, unstack(bucket, new)


def _tall(spec: StackPlan) -> list[bool]:
    """Which matrices of a stack are stored transposed."""
    return [piece.tall for piece in spec.pieces for _ in range(piece.count)]


def _duals(bucket: Bucket, stacks: list[Stack], factors: list[Stack]) -> dict[str, Tensor]:
    """<U, O> of every leaf, the sum over its matrices."""
    duals: dict[str, Tensor] = {}
    for spec, matrices, factor in zip(bucket.stacks, stacks, factors, strict=True):
        products = (matrices * factor).sum((-2, -1)).unbind()
        for path, product in zip(spec.paths, products, strict=True):
            duals[path] = duals[path] + product if path in duals else product
    return duals


def _others(group: RuleGroup, call: Call) -> _Moved:
    """-lr D and the new slots of leaves of one shape, by their auxiliary rule."""
    paths, rule = group.paths, call.config.rules[group.name]
    slots = {
        slot: _stacked([call.store(group, slot)[path] for path in paths]).to(group.dtype)
        for slot in rule.slots
    }
    zeros = torch.zeros(group.shape, dtype=group.dtype, device=group.device)
    grad = _stacked([call.gradient(path, zeros) for path in paths]).to(group.dtype)
    defaults = {"beta1": rule.betas[0], "beta2": rule.betas[1], "eps": rule.eps}
    beta1, beta2, eps = (
        spread(call.of(option, paths, group.device, default), grad)
        for option, default in defaults.items()
    )
    t = spread(call.count(paths, group.device), grad)
    direction, new = rule.direction(rule, grad, slots, t, (beta1, beta2), eps)
    rate = call.rate(group)
    update = direction * spread(-rate, grad).to(group.dtype)
    kept = {
        slot: dict(zip(paths, call.masked(new[slot], paths, slots[slot]).unbind(), strict=True))
        for slot in rule.slots
    }
    return _Moved(list(update.unbind()), kept, [], [rate])


def _is_alone(group: Group, path: str) -> bool:
    """Whether the pointwise work of a leaf was its own, so that its results are no views."""
    return (path,) in (group.groups if isinstance(group, Bucket) else (group.paths,))


def _stacked(tensors: list[Tensor]) -> Tensor:
    # A view where there is one.
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _constant(values: Sequence[float], device: torch.device) -> float | Tensor:
    """A number if all are equal, else a float64 vector."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)


def _strided(update: Tensor, like: Tensor | None) -> Tensor:
    """The update with the strides of its leaf: a tall matrix comes back as a transposed view."""
    if like is None or like.stride() == update.stride():
        return update
    return _owned(update, like)


def _owned(new: Tensor, old: Tensor) -> Tensor:
    """A copy with the strides of the old, so that no leaf keeps a stack alive."""
    if not old.numel():
        # Of any strides, which a graph asks for all the same.
        return new.new_empty_strided(old.shape, old.stride())
    order, inverse = _memory_order(old)
    return new.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def _memory_order(tensor: Tensor) -> tuple[list[int], list[int]]:
    order = sorted(range(tensor.ndim), key=lambda a: (-tensor.stride(a), tensor.shape[a] == 1))
    return order, [order.index(axis) for axis in range(tensor.ndim)]


def _is_writable(tensor: Tensor) -> bool:
    return all(s or size == 1 for s, size in zip(tensor.stride(), tensor.shape, strict=True))


def _zeros(leaf: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or (torch.float64 if leaf.dtype == torch.float64 else torch.float32)
    return torch.zeros_like(leaf, dtype=dtype, requires_grad=False)


def _copy(nested: Any) -> Any:
    return {k: _copy(v) for k, v in nested.items()} if isinstance(nested, dict) else nested


# ---- the public functions ------------------------------------------------------------------------


@refuses_clipping
def muon(
    lr: Scalar = 1e-3,
    *,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    bias_correction: bool = True,
    weight_decay: Scalar | Callable[[str, Tensor], float] = 0.0,
    decay: str = "decoupled",
    orthogonalize: str | Orthogonalizer = NewtonSchulz(),
    adaptive: bool = False,
    equilibrate: str | None = None,
    renormalize: str | None = None,
    second_moment: str | SecondMoment | None = None,
    scale: str | ScaleRule = "match_rms_adamw",
    momentum_dtype: torch.dtype | str | None = None,
    rounding: str | Stochastic | None = "nearest",
    master: str | None = None,
    metrics: Sequence[str] = (),
    mesh: Any = None,
    auxiliary: Rule | Mapping[str, Rule] = adamw(),
    labels: Mapping[str, Label] | Callable[[str, Tensor], Label | None] | None = None,
    missing: str = "skip",
    nonfinite: str = "propagate",
    max_stack_bytes: int | None = None,
    differentiable: bool = False,
) -> Transformation:
    """Muon for the matrices and an auxiliary rule for the rest, as pure `init` and `update`.

    lr, momentum and weight_decay are scalars: a number, a 0-d tensor, or a callable of the step.

    Args:
        lr: learning rate, shared by matrices and the other leaves (times the rule's `lr_scale`).
        momentum: decay of the average of the gradients, in [0, 1). The bias correction of a
            schedule, such as `lambda step: 0.85 + 0.1 * (step / 300).clamp(max=1)`, is that of a
            decay that always was what it is now.
        nesterov: act on the look-ahead of the average, not on the average.
        bias_correction: undo the average's start at zero, as Adam does.
        weight_decay: decoupled, not multiplied by the shape scale: -lr weight_decay W is added. A
            callable (path, tensor) -> number masks it leaf by leaf.
        decay: a row of `fmuon.decay.DECAYS`: "decoupled"; "independent" of the learning rate,
            which is then left out of the product; "squared", with lr^2. With "cautious",
            "cautious_independent" and "cautious_squared" only entries decay that the rest of the
            update doesn't push away from zero [Chen et al. 2025, arXiv 2510.12402, algorithm 1].
        orthogonalize: a method or its name in `fmuon.methods.METHODS`.
        adaptive: multiply the factor O of a leaf by <U, O>, the dual norm of what is
            orthogonalised, so that the update grows with the gradient
            [Bernstein and Newhouse 2024, arXiv 2409.20325, proposition 1].
        equilibrate: what is done to a matrix before it is orthogonalised, a row of
            `fmuon.balance.EQUILIBRATIONS`: "rows", "columns" or "rows_and_columns" get equal norms
            [Chang et al. 2026, arXiv 2603.28254]; "sign" takes its signs.
        renormalize: what is done to its factor O, a row of `fmuon.balance.RENORMALIZATIONS`:
            "rows" or "columns" get the norm 1, or both, one after the other, in "rows_columns" and
            "columns_rows" [Zhang et al. 2026, arXiv 2602.21545]; "frobenius" gives O the norm of
            an exact factor, sqrt(min(m, n)).
        second_moment: "normuon", or a `NorMuon`: even out the rows of O by their averaged squares;
            "adamuon", or an `AdaMuon`: its entries.
        scale: name of a rule in `fmuon.scaling.SCALES`, or a callable (fan_out, fan_in) -> float.
            With the default one lr serves all leaves, and a lr tuned for AdamW carries over.
        momentum_dtype: in which the momentum of matrices is kept: a floating point dtype; None,
            which is float32, or float64 for float64 leaves; "int8" (needs torchao) or "fp8", codes
            with a float32 scale for every 272 of them at most.
        rounding: how what becomes of a leaf of 16 bits is rounded: "nearest", or "stochastic", or
            a `Stochastic` with another seed. The update is then the difference to the value that
            was chosen, so that adding it rounds no more.
        master: "mantissa" keeps, for every bfloat16 leaf, the 16 bits in `state["mantissa"]` that
            make it a float32, which decays and is updated exactly. What else changes the leaf
            meanwhile changes that float32 alike.
        metrics: names out of `fmuon.metrics.METRICS`, computed in every update into
            `state["metrics"]`, a flat dict of 0-d float32 tensors with keys such as
            "fmuon/update_rms/<path>".
        mesh: a DeviceMesh or process group whose ranks have the same plain params and gradients
            (as under DDP) and share the work: each matrix is orthogonalised on one of them. Leaves
            on a part of that mesh are shared along the rest of it too.
        auxiliary: the rule of every leaf that is no matrix, or a dict name -> rule; a label names
            its rule, and "auxiliary" means the first one.
        labels: what each leaf is, by path: an ordered dict (first match wins; a key is a path, or
            "re:" and a pattern for whole paths), or a callable (path, tensor) -> label or None that
            sees shapes only. A label is a `Matrix`, "muon", "auxiliary" or a rule's name, "frozen",
            or "error". Leaves without a label: a 2-D leaf is a matrix unless a component of its
            path says embedding or head; the rest is auxiliary. `fmuon.label(module)` does better.
        missing: what a gradient of None means: "skip" (leave leaf and state alone), "zero" (as if
            it were zero) or "error".
        nonfinite: what a step with an infinite or NaN gradient does: "propagate" it, or "skip":
            updates are zero, and state and counts as if the step had not been made, decided on the
            device.
        max_stack_bytes: how much of the matrices is copied into stacks at a time; None is 2^28 for
            `update`, and for `update_` the largest leaf and a 32nd of them all, or 2^19.
        differentiable: keep the autograd graph through the update.

    Returns:
        A `Transformation`. Its init and update have the signatures of `fmuon.init` and
        `fmuon.update`.

    Raises:
        ConfigurationError: an option has a value that is not allowed.
    """
    rules = auxiliary.values() if isinstance(auxiliary, Mapping) else [auxiliary]
    for rule in rules:
        if not isinstance(rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"auxiliary={auxiliary!s:.99}: give a rule such as fmuon.adamw(), or a dict name "
                f"-> rule; FMuon, but not muon, also takes a class of torch optimizers, or (class, "
                f"dict of its arguments)"
            )
    if not isinstance(metrics, list | tuple):
        raise ConfigurationError(f"metrics={metrics!r}: give a tuple of names")
    if isinstance(labels, Mapping):
        labels = tuple(labels.items())  # pyright: ignore[reportAssignmentType]
    configuration = Muon(
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        bias_correction=bias_correction,
        weight_decay=weight_decay,
        decay=decay,
        orthogonalize=orthogonalizer(orthogonalize),
        adaptive=adaptive,
        equilibrate=equilibrate,
        renormalize=renormalize,
        second_moment=second_moment_method(second_moment),
        scale=scale_rule(scale),
        momentum_dtype=momentum_dtype,
        rounding=rounding_method(rounding),
        master=master,
        metrics=tuple(metrics),
        mesh=None if mesh is None else register(mesh),
        auxiliary=auxiliary if isinstance(auxiliary, Rule) else tuple(auxiliary.items()),
        labels=labels,  # pyright: ignore[reportArgumentType]
        missing=missing,
        nonfinite=nonfinite,
        max_stack_bytes=max_stack_bytes,
        differentiable=differentiable,
    )
    return Transformation(configuration.init, configuration.update)


def configuration_of(opt: Any) -> Muon:
    """The configuration whose methods a transformation, or that of an `FMuon`, holds."""
    opt = getattr(opt, "transformation", opt)
    owner = getattr(getattr(opt, "update", None), "__self__", None)
    if not isinstance(owner, Muon):
        raise ConfigurationError(
            f"a {type(opt).__name__} that was not made by fmuon.muon or a preset; give what they "
            f"return, or an FMuon"
        )
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
            place of the configured ones, each a scalar or a flat dict path -> scalar;
            `present`, a dict path -> 0-d bool tensor: where it is False the leaf is skipped as if
            its gradient were None, within one graph; and `found_inf`, a 0-d tensor: where it isn't
            zero the whole step is skipped.

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


def adapt_state(
    opt: Transformation,
    state: State,
    params: Tree,
    step: int,
    *,
    rename: Mapping[str, str] | None = None,
    add: Collection[str] = (),
    drop: Collection[str] = (),
    resize: Collection[str] = (),
) -> State:
    """The state for a changed set of leaves: those that stay go on, those that join start afresh.

    Args:
        opt: for the new leaves; its labels may name them.
        state: of the old leaves; not written, and shared where nothing changes.
        params: the new leaves.
        step: updates already applied, so that leaves that join now count theirs from here.
        rename: old path -> new path.
        add: paths of leaves that join: new ones, and frozen ones that are trained from now on.
        drop: old paths that end.
        resize: paths of leaves whose number of rows changed; further rows start at zero.

    Raises:
        StateError: lists every difference that isn't declared, and every declaration in vain.
    """
    fresh = configuration_of(opt).init(params, step)
    old = {(store, path): tensor for store, path, tensor in entries(state)}
    new = list(entries(fresh))
    source = origins(
        _shapes(entries(state)), _shapes(new), rename=rename, add=add, drop=drop, resize=resize
    )
    for store, path, tensor in new:
        origin = source[path]
        if origin is None:
            continue
        if (store, origin) not in old:
            raise StateError(
                f"{path!r}: needs {'.'.join(store)}, which the state doesn't hold for {origin!r}; "
                f"its label has changed: name {origin!r} in drop and {path!r} in add"
            )
        target = functools.reduce(operator.getitem, store, fresh)
        target[path] = resized(path, old[store, origin], tensor)
    return fresh


def _shapes(found: Iterable[tuple[tuple[str, ...], str, Tensor]]) -> dict[str, tuple[int, ...]]:
    # "missed" comes last and is 0-d: the slots of a leaf, where it has any, say its shape.
    shapes: dict[str, tuple[int, ...]] = {}
    for _, path, tensor in found:
        shapes.setdefault(path, tuple(tensor.shape))
    return shapes


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """params + updates, with the structure and dtypes of params; None leaves it as it is.

    16-bit params are added in float32 and rounded once. Unless an update carries an autograd graph
    the new leaves are detached, and outside torch.compile their `requires_grad` is that of the old.
    Inside `torch.func` transforms nothing is detached.
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
    # What a transform of torch.func records ends with it.
    if change.requires_grad or is_transformed():
        return (param + change).to(param.dtype)
    new = param.detach()
    if local(param).numel():
        # The sum of shards without elements would have other strides than they.
        new = (new + change).to(param.dtype)
    # A graph can't return a tensor whose requires_grad was set inside it.
    return new if torch.compiler.is_compiling() else new.requires_grad_(param.requires_grad)
