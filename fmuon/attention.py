# SPDX-License-Identifier: Apache-2.0
"""QK-clip: keep attention logits bounded by scaling the weights that make queries and keys.

    S_h = max over the batch and positions i, j of q_i . k_j / sqrt(d), before the softmax
    gamma_h = min(1, tau / S_h)

The logits of head h are shrunk by gamma_h [Kimi Team 2025, arXiv 2507.20534, algorithm 1]. That is
no part of an update: it comes after it, and reads no gradient and no state.

Which rows of which leaf are scaled is planned from names, shapes and shardings; execution is one
product per leaf with a vector of row factors, which is 1 in all rows that stay.
"""

import contextlib
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fmuon.base import (
    ConfigurationError,
    LeafError,
    Tree,
    constant_in_graphs,
    is_number,
    is_transformed,
    lookup,
    near_misses,
)
from fmuon.collectives import (
    SHARDINGS,
    is_sharded,
    like,
    local,
    register_meshes,
    sharding_number,
)
from fmuon.tree import flatten, unwrapped

# gamma [key_heads, queries per key] -> what a shared key head is multiplied by, [key_heads].
SHARED_KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda gamma: gamma.amax(-1).sqrt(),
    "smallest": lambda gamma: gamma.amin(-1).sqrt(),
    "query": lambda gamma: torch.ones_like(gamma[..., 0]),
}


@dataclass(frozen=True)
class Heads:
    """Where a leaf has the rows of the heads: `size` rows each, one head after the other.

    Attributes:
        path: of the leaf: a weight, or a bias, whose rows are scaled alike.
        size: rows of one head; None divides all rows of the leaf equally.
        start: first row of the first head.
        stride: rows from one run of heads to the next; None is `adjacent * size`, no gap.
        adjacent: heads in one run.
        axis: of the leaf, on which the rows are: 0 for (out, in) as in `torch.nn.Linear`, 1 for
            kernels stored (in, out).

    Rows of fused leaves, with heads of d rows:

    >>> Heads("qkv", d), Heads("qkv", d, start=heads * d)  # query and key of [all q, all k, all v]
    >>> Heads("qkv", d, stride=3 * d)                      # query of [q, k, v, q, k, v, ...]
    >>> Heads("qkv", d, stride=4 * d, adjacent=2)          # query of [q, q, k, v, q, q, k, v, ...]
    """

    path: str
    size: int | None = None
    start: int = 0
    stride: int | None = None
    adjacent: int = 1
    axis: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):  # pyright: ignore
            raise ConfigurationError(f"Heads: path={self.path!r}; give the path of a leaf")
        if not is_number(self.axis, whole=True):
            raise ConfigurationError(f"Heads({self.path!r}): axis={self.axis!r}; give an int")
        size = 1 if self.size is None else self.size
        known = all(is_number(n, whole=True) for n in (self.adjacent, size))
        least = self.adjacent * size if known else 1
        for name, lowest in (("size", 1), ("start", 0), ("stride", least), ("adjacent", 1)):
            value = getattr(self, name)
            optional = value is None and name in ("size", "stride")
            counts = is_number(value, whole=True)
            if not optional and not (counts and value >= lowest):  # pyright: ignore
                raise ConfigurationError(
                    f"Heads({self.path!r}): {name}={value}; give an int of {lowest} or more"
                )
        if self.size is None and (self.start, self.stride, self.adjacent) != (0, None, 1):
            raise ConfigurationError(
                f"Heads({self.path!r}): start, stride and adjacent need size, the rows of one head"
            )


Rows: TypeAlias = str | Heads | tuple[str | Heads, ...]
"""The leaves that add up to queries or keys; a path alone is `Heads(path)`."""


@dataclass(frozen=True)
class Attention:
    """Which leaves make the queries and the keys of one attention layer.

    Attributes:
        heads: how many query heads.
        query, key: their rows: a path, a `Heads`, or a tuple of them where several leaves add up
            (weight and bias; a base weight and the B of its adapter).
        key_heads: how many key heads; None is as many as query heads. Query heads g r to g r + r-1
            use key head g, with r = heads / key_heads.
        rotary_query: rows of queries that meet a rotary key that all heads share and that isn't
            scaled, as in multi-head latent attention (MLA).
        shared_keys: what a key head that several query heads use is multiplied by; each of them is
            multiplied by gamma_h over that, so that its logits shrink by gamma_h in any case.
            "largest": the root of the largest gamma of its query heads. No weight grows, and heads
            that aren't clipped keep their bits. "smallest": the root of the smallest; rows of query
            heads that are clipped less grow to make up for it. "query": 1, so keys stay. With one
            query head per key head the first two are Kimi's rule, sqrt(gamma_h) each.

    >>> Attention(8, query="attn.q.weight", key="attn.k.weight")
    >>> Attention(8, query=("q.weight", "q.bias"), key=("k.weight", "k.bias"), key_heads=2)
    >>> Attention(                                # MLA of DeepSeek-V3 and Kimi K2
    ...     64,
    ...     query=Heads("q_b_proj.weight", 128, stride=192),
    ...     rotary_query=Heads("q_b_proj.weight", 64, start=128, stride=192),
    ...     key=Heads("kv_b_proj.weight", 128, stride=256),
    ... )
    """

    heads: int
    query: Rows
    key: Rows
    key_heads: int | None = None
    rotary_query: Rows = ()
    shared_keys: str = "largest"

    def __post_init__(self) -> None:
        # Lists are accepted and stored as tuples: a layer must be hashable.
        for name in ("query", "key", "rotary_query"):
            value = getattr(self, name)
            value = tuple(value) if isinstance(value, list) else value
            object.__setattr__(self, name, value)
            rows = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(entry, str | Heads) for entry in rows):
                raise ConfigurationError(
                    f"Attention: {name}={value!r}; give a path, a Heads, or a tuple of them"
                )
        counts = (self.heads, self.keys)
        if (
            not all(is_number(n, whole=True) for n in counts)
            or self.heads < 1
            or self.keys < 1
            or self.heads % self.keys
        ):
            raise ConfigurationError(
                f"Attention: heads={self.heads}, key_heads={self.key_heads}; give positive counts, "
                f"heads a multiple of key_heads"
            )
        lookup(SHARED_KEYS, self.shared_keys, "shared_keys")

    @property
    def keys(self) -> int:
        """How many key heads there are."""
        return self.heads if self.key_heads is None else self.key_heads

    def parts(self) -> "_Parts":
        """(factor, number of heads, fields of a `Heads`) for every leaf: constants in a trace."""
        named = (
            ("query", self.query, self.heads),
            ("key", self.key, self.keys),
            ("rotary_query", self.rotary_query, self.heads),
        )
        return tuple(
            (factor, count, (h.path, h.size, h.start, h.stride, h.adjacent, h.axis))
            for factor, rows, count in named
            for h in _each(rows)
        )


def qk_clip(
    params: Tree,
    max_logits: Mapping[str, Tensor],
    tau: float | Tensor = 100.0,
    *,
    layers: Mapping[str, Attention],
    differentiable: bool = False,
) -> Tree:
    """The params after an update, with heads whose logits exceed `tau` scaled back to it.

    With gamma_h = min(1, tau / S_h), the rows of query head h and of its key head are multiplied by
    sqrt(gamma_h) each, rotary query rows that meet a shared rotary key by gamma_h
    [Kimi Team 2025, arXiv 2507.20534, algorithm 1]; key heads that several query heads share are
    scaled as `Attention.shared_keys` says. The logits of head h for any input are gamma_h times
    what they were, if nothing but linear maps and rotations is between these rows and the logits: a
    norm of queries and keys undoes any factor, and such layers need no clip.

    Heads with S_h <= tau keep their bits, and so do heads whose S_h is infinite or NaN: nothing can
    be learned from it, and gamma = 0 would end the head. (`nonfinite="skip"` leaves such a step
    out.) Nothing passed in is written, no value is read on the host, and it traces into one graph;
    of DTensors it does so after `opt.init(params)` or `fmuon.distributed.prepare`.

    Args:
        params: a pytree of tensors, plain or DTensors; may be just the leaves that `layers` name. A
            leaf of None stays None. 16-bit leaves are multiplied in float32 and rounded once.
        max_logits: layer -> S, a tensor of shape [heads]: the largest logit of each head in this
            step, after the factor 1 / sqrt(d) and before the softmax, over the whole batch. Where
            ranks see different data or parts of the sequence, reduce it first by max over them all
            (`torch.distributed.all_reduce(s, ReduceOp.MAX)`): ranks that differ in it would end
            with different weights.
        tau: the bound, a positive number or a 0-d tensor.
        layers: layer -> `Attention`, with the same keys as `max_logits`.
        differentiable: keep the autograd graph through the product.

    Returns:
        params with the same structure, dtypes, strides and placements. Leaves that no layer names
        are the same objects; without `differentiable` the others are detached, with the old
        `requires_grad` outside torch.compile.

    Raises:
        ConfigurationError: tau is not positive, or `layers` and `max_logits` don't name the same.
        LeafError: a path is no leaf, or heads or logits don't fit their shapes.

    After a step of `FMuon`, or of any other optimizer:

    >>> layers = {"attn": fmuon.Attention(4, query="attn.q.weight", key="attn.k.weight")}
    >>> optimizer.step()
    >>> named = dict(model.named_parameters())
    >>> with torch.no_grad():
    ...     for path, clipped in fmuon.qk_clip(named, {"attn": logits}, layers=layers).items():
    ...         if clipped is not named[path]:
    ...             named[path].copy_(clipped)
    """
    if isinstance(tau, int | float) and not 0 < tau < math.inf:
        raise ConfigurationError(f"tau={tau}: must be positive and finite")
    leaves, structure = flatten(params)
    if not torch.compiler.is_compiling():
        register_meshes(leaves.values())
    scaled = _plan(
        tuple((name, layer.heads, layer.parts()) for name, layer in layers.items()),
        tuple((path, None if leaf is None else _spec(path, leaf)) for path, leaf in leaves.items()),
        tuple((name, _shape(name, logits)) for name, logits in max_logits.items()),
    )
    with contextlib.nullcontext() if differentiable else torch.no_grad():
        factors = {name: _factors(layer, max_logits[name], tau) for name, layer in layers.items()}
        new = dict(leaves)
        for leaf in scaled:
            new[leaf.path] = _clipped(leaves[leaf.path], leaf, factors, differentiable)
    return structure.rebuild(new)


# ---- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Rows of a leaf with one factor per head; the fields of `Heads`, bound to a shape."""

    layer: str
    factor: str
    count: int
    size: int
    start: int
    stride: int
    adjacent: int

    def intervals(self) -> list[tuple[int, int]]:
        """(start, stop) of every run of adjacent heads."""
        starts = (self.start + i * self.stride for i in range(self.count // self.adjacent))
        return [(start, start + self.adjacent * self.size) for start in starts]


@dataclass(frozen=True)
class _Leaf:
    """A leaf with rows to scale: `length` of them, of which this rank has (start, stop)."""

    path: str
    axis: int
    rank: int
    length: int
    own: tuple[int, int]
    runs: tuple[_Run, ...]


_Parts: TypeAlias = tuple[tuple[str, int, tuple[Any, ...]], ...]
_Spec: TypeAlias = tuple[tuple[int, ...], torch.dtype, int | None]


def _spec(path: str, leaf: Tensor) -> _Spec:
    # operator.index makes dynamo specialise on a size that it holds to be symbolic.
    shape = tuple(map(operator.index, leaf.shape))
    given: Any = leaf
    number = None
    if is_sharded(given):
        number = sharding_number(path, given.device_mesh, given.placements, shape)
    return shape, leaf.dtype, number


def _shape(name: str, logits: Any) -> tuple[int, ...]:
    if not isinstance(logits, Tensor) or is_sharded(logits):
        raise LeafError(
            f"max_logits[{name!r}] is a {type(logits).__name__}; give a plain tensor with one "
            f"entry per head, the same on all ranks"
        )
    return tuple(map(operator.index, logits.shape))


@constant_in_graphs
def _plan(*arguments: Any) -> tuple[_Leaf, ...]:
    return _planned(*arguments)


# Dynamo would trace through the cache of a decorated function.
@functools.lru_cache(maxsize=64)
def _planned(
    layers: tuple[tuple[str, int, _Parts], ...],
    specs: tuple[tuple[str, _Spec | None], ...],
    logits: tuple[tuple[str, tuple[int, ...]], ...],
) -> tuple[_Leaf, ...]:
    _check_logits({name: heads for name, heads, _ in layers}, dict(logits))
    known = dict(specs)
    wrapped = {unwrapped(path): path for path in known}
    runs: dict[str, list[_Run]] = defaultdict(list)
    axes: dict[str, set[int]] = defaultdict(set)
    for name, _, parts in layers:
        for factor, count, fields in parts:
            heads = Heads(*fields)
            where = f"layers[{name!r}].{factor}"
            path = heads.path if heads.path in known else wrapped.get(unwrapped(heads.path))
            if path is None:
                raise LeafError(
                    f"{where}: {heads.path!r} is no leaf of params{near_misses(heads.path, known)}"
                )
            spec = known[path]
            if spec is None:
                continue
            axes[path].add(_axis(where, heads, spec))
            length = spec[0][heads.axis]
            runs[path].append(_bound(where, name, factor, heads, count, length))
    return tuple(_leaf(path, axes[path], own, known[path]) for path, own in runs.items())


def _check_logits(heads: Mapping[str, int], logits: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in logits.items():
        if name not in heads:
            raise ConfigurationError(
                f"max_logits: {name!r} is no layer of layers={list(heads)}"
                f"{near_misses(name, heads)}"
            )
        if shape != (heads[name],):
            raise LeafError(
                f"max_logits[{name!r}] has the shape {shape}, the layer has {heads[name]} heads; "
                f"give the largest logit of each head, over batch and positions, in a tensor of "
                f"shape ({heads[name]},)"
            )
    if absent := [name for name in heads if name not in logits]:
        raise ConfigurationError(
            f"max_logits: nothing for the layers {absent}; give their logits, or leave them out of "
            f"layers"
        )


def _each(rows: Rows) -> list[Heads]:
    given = rows if isinstance(rows, tuple) else (rows,)
    return [Heads(entry) if isinstance(entry, str) else entry for entry in given]


def _axis(where: str, heads: Heads, spec: _Spec) -> int:
    shape, dtype, _ = spec
    if not dtype.is_floating_point:
        raise LeafError(f"{where}: {heads.path!r} has dtype {dtype}; floating point needed")
    if not -len(shape) <= heads.axis < len(shape):
        raise LeafError(
            f"{where}: {heads.path!r} of shape {shape} has no axis {heads.axis}; name the one that "
            f"has the rows of the heads"
        )
    return heads.axis % len(shape)


def _bound(where: str, layer: str, factor: str, heads: Heads, count: int, length: int) -> _Run:
    path, axis = heads.path, heads.axis
    if heads.size is None and length % count:
        raise LeafError(
            f"{where}: axis {axis} of {path!r} has {length} rows, no multiple of {count} heads; "
            f"correct the number of heads, or give Heads({path!r}, size=..., start=..., "
            f"stride=...) where it has other rows too"
        )
    if count % heads.adjacent:
        raise LeafError(
            f"{where}: {count} heads of {path!r} are not made of runs of "
            f"adjacent={heads.adjacent}; give a divisor of {count}"
        )
    size = length // count if heads.size is None else heads.size
    stride = heads.adjacent * size if heads.stride is None else heads.stride
    run = _Run(layer, factor, count, size, heads.start, stride, heads.adjacent)
    if (end := run.intervals()[-1][1]) > length:
        raise LeafError(
            f"{where}: {count} heads of {size} rows end at row {end}, axis {axis} of {path!r} has "
            f"{length}; correct size, start, stride or the number of heads"
        )
    return run


def _leaf(path: str, axes: set[int], runs: list[_Run], spec: _Spec | None) -> _Leaf:
    assert spec is not None
    shape, _, number = spec
    if len(axes) > 1:
        raise LeafError(f"{path!r}: heads on the axes {sorted(axes)}; all are on one")
    taken = [(*interval, run) for run in runs for interval in run.intervals()]
    taken.sort(key=lambda entry: entry[:2])
    for (_, stop, one), (start, _, other) in itertools.pairwise(taken):
        if start < stop:
            raise LeafError(
                f"{path!r}: row {start} is in layers[{one.layer!r}].{one.factor} and in "
                f"layers[{other.layer!r}].{other.factor}, and would be scaled twice; name it once"
            )
    (axis,) = axes
    own = (0, shape[axis]) if number is None else SHARDINGS[number].own[axis]
    return _Leaf(path, axis, len(shape), shape[axis], own, tuple(runs))


# ---- execution -----------------------------------------------------------------------------------


def _factors(layer: Attention, logits: Tensor, tau: float | Tensor) -> dict[str, Tensor]:
    """What the rows of each head are multiplied by, float64, [heads] or [key_heads]."""
    largest = logits.to(torch.float64)
    if isinstance(tau, Tensor):
        tau = tau.to(largest)
    # tau / tau is 1 to the last bit.
    gamma = tau / torch.where((largest > tau) & largest.isfinite(), largest, tau)
    groups = gamma.reshape(layer.keys, layer.heads // layer.keys)
    key = SHARED_KEYS[layer.shared_keys](groups)
    return {"query": (groups / key[:, None]).flatten(), "key": key, "rotary_query": gamma}


def _clipped(
    leaf: Any, plan: _Leaf, factors: Mapping[str, Mapping[str, Tensor]], differentiable: bool
) -> Tensor:
    own = local(leaf)
    if not own.numel():
        return leaf
    rows = functools.reduce(
        torch.mul, [_spread(run, factors[run.layer][run.factor], plan.length) for run in plan.runs]
    )
    rows = rows[slice(*plan.own)].reshape([-1 if a == plan.axis else 1 for a in range(plan.rank)])
    dtype = torch.promote_types(own.dtype, torch.float32)
    new = like((own.to(dtype) * rows.to(own.device, dtype)).to(own.dtype), leaf)
    # A graph can't return a tensor whose requires_grad was set inside it.
    if differentiable or torch.compiler.is_compiling() or is_transformed():
        return new
    return new.requires_grad_(leaf.requires_grad)


def _spread(run: _Run, factor: Tensor, length: int) -> Tensor:
    """One factor per head -> one per row of the leaf, 1 in rows of no head."""
    heads = factor.reshape(-1, run.adjacent, 1).expand(-1, -1, run.size).flatten(1)
    gap = run.stride - run.adjacent * run.size
    # After the last run there may be less than a gap.
    rows = F.pad(heads, (0, gap), value=1.0).flatten()[: length - run.start]
    return F.pad(rows, (run.start, length - run.start - rows.shape[0]), value=1.0)
