# SPDX-License-Identifier: Apache-2.0
"""Labelled leaves -> hashable plan of same-shape stacks; stack and unstack.

Planning (`plan`) reads views, dtypes and devices. Execution (`stack`, `unstack`) is straight-line
tensor code that follows a plan. Every matrix is stored wide in its stack: tall ones transposed.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch import Tensor

from fmuon.base import Stack, View
from fmuon.scaling import ScaleRule
from fmuon.sharding import Domain, Exchange, Sharding, balanced, exchange

SMALL = 2**13
"""Elements up to which leaves of one shape are stacked for pointwise work."""


@dataclass(frozen=True)
class MatrixLeaf:
    """A leaf with its matrix view, the dtype of its arithmetic and its device.

    Of a sharded leaf the view is that of the whole.
    """

    path: str
    view: View
    dtype: torch.dtype
    device: torch.device
    sharding: Sharding | None = None

    @property
    def domain(self) -> Domain | None:
        """The ranks that share its work."""
        return None if self.sharding is None else self.sharding.domain


@dataclass(frozen=True)
class Piece:
    """A block of the view of one leaf: `count` matrices of one shape.

    Attributes:
        leaf: index among the leaves of the bucket.
        position: of the block among those of its leaf, row-major.
        rows, columns: (start, stop) in the view.
        tall: stored transposed.
        count: length of the leaf's stack axes.
    """

    leaf: int
    position: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    tall: bool
    count: int


@dataclass(frozen=True)
class StackPlan:
    """Matrices of one shape (short x long) that are orthogonalised together.

    `paths` and `scales` have one entry per matrix: the leaf it belongs to and its shape scale.
    `chunk` matrices at a time are orthogonalised, where one leaf alone exceeds the limit in bytes.
    `total` counts the matrices of that shape in all buckets and, shared ones, on all ranks.
    """

    short: int
    long: int
    total: int
    pieces: tuple[Piece, ...]
    counts: tuple[int, ...]
    paths: tuple[str, ...]
    scales: tuple[float, ...]
    chunk: int


@dataclass(frozen=True)
class Bucket:
    """Leaves that are updated together: those that share stacks, up to a size in bytes.

    `groups` are the paths again, by what is averaged together: small leaves of one native shape.
    `leaves` and `stacks` are those that this rank orthogonalises: all of them, unless an `exchange`
    brings leaves to their owners.
    """

    paths: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    leaves: tuple[MatrixLeaf, ...]
    stacks: tuple[StackPlan, ...]
    dtype: torch.dtype
    device: torch.device
    exchange: Exchange | None = None


def plan(
    leaves: Sequence[MatrixLeaf],
    scale: ScaleRule,
    max_stack_bytes: int | None,
    *,
    in_place: bool = False,
    flops: Callable[[int, int], float] = lambda short, long: short**2 * (2 * long + short),
) -> tuple[Bucket, ...]:
    """Group leaves into buckets whose stacks are as large as `max_stack_bytes` allows.

    None is 2^28 for results in memory of their own; in place, where the stacks are most of what a
    step needs, it is the largest leaf and a 32nd of them all, but not less than 2^19: below that
    batches are too small to be fast.

    The grouping depends on paths, shapes, dtypes and devices only, not on the order of the leaves,
    so every rank groups alike. Leaves that are shared among ranks are in buckets of their own; they
    are given to owners so that all have about as many `flops`.
    """
    sizes: dict[Domain | None, list[int]] = defaultdict(list)
    for leaf in leaves:
        sizes[leaf.domain].append(_bytes(leaf))
    totals: Counter[tuple[int, int]] = Counter()
    for leaf in leaves:
        for shape in _shapes(leaf):
            totals[shape] += leaf.view.count
    buckets: list[Bucket] = []
    for domain, group, owner_of in assigned(leaves, flops):
        limit = max_stack_bytes
        if limit is None:
            # Other ranks may have more or less of leaves that they don't share.
            thrifty = max(max(sizes[domain]) + sum(sizes[domain]) // 32, 2**19)
            limit = thrifty if in_place else 2**28
        for connected in _connected(group):
            for chunk in _chunks(connected, limit):
                buckets.append(_bucket(chunk, domain, owner_of, scale, limit, totals))
    return tuple(buckets)


def assigned(
    leaves: Sequence[MatrixLeaf], flops: Callable[[int, int], float]
) -> list[tuple[Domain | None, list[MatrixLeaf], dict[str, int]]]:
    """(domain, leaves, path -> worker of the domain) of leaves that may share stacks."""
    groups: dict[tuple[torch.dtype, torch.device, Domain | None], list[MatrixLeaf]]
    groups = defaultdict(list)
    for leaf in sorted(leaves, key=lambda leaf: leaf.path):
        groups[leaf.dtype, leaf.device, leaf.domain].append(leaf)
    found: list[tuple[Domain | None, list[MatrixLeaf], dict[str, int]]] = []
    for (_, _, domain), group in groups.items():
        workers = 1 if domain is None else domain.workers
        owners = balanced([cost(leaf, flops) for leaf in group], workers)
        owner_of = {leaf.path: owner for leaf, owner in zip(group, owners, strict=True)}
        found.append((domain, group, owner_of))
    return found


def cost(leaf: MatrixLeaf, flops: Callable[[int, int], float]) -> float:
    """Flops of the products for all matrices of a leaf."""
    return leaf.view.count * sum(flops(*shape) for shape in _shapes(leaf))


def _bytes(leaf: MatrixLeaf) -> int:
    """What the copy in a stack takes on one rank, on average."""
    workers = 1 if leaf.domain is None else leaf.domain.workers
    return math.prod(leaf.view.shape) * leaf.dtype.itemsize // workers


def _shapes(leaf: MatrixLeaf) -> list[tuple[int, int]]:
    """(short, long) of every block of a leaf."""
    sides = product(leaf.view.row_blocks, leaf.view.column_blocks)
    return [(min(rows, columns), max(rows, columns)) for rows, columns in sides]


def _connected(leaves: Sequence[MatrixLeaf]) -> list[list[MatrixLeaf]]:
    """Leaves that share a matrix shape, directly or through others, in one list."""
    components: list[tuple[set[tuple[int, int]], list[MatrixLeaf]]] = []
    for leaf in leaves:
        shapes, members = set(_shapes(leaf)), [leaf]
        apart: list[tuple[set[tuple[int, int]], list[MatrixLeaf]]] = []
        for component in components:
            if component[0] & shapes:
                shapes, members = component[0] | shapes, component[1] + members
            else:
                apart.append(component)
        components = [*apart, (shapes, members)]
    return [sorted(members, key=lambda leaf: leaf.path) for _, members in components]


def _chunks(leaves: Sequence[MatrixLeaf], max_bytes: int) -> list[list[MatrixLeaf]]:
    chunks: list[list[MatrixLeaf]] = []
    used = 0
    for leaf in leaves:
        size = _bytes(leaf)
        if not chunks or used + size > max_bytes:
            chunks.append([])
            used = 0
        chunks[-1].append(leaf)
        used += size
    return chunks


def _bucket(
    members: Sequence[MatrixLeaf],
    domain: Domain | None,
    owner_of: Mapping[str, int],
    scale: ScaleRule,
    max_bytes: int,
    totals: Mapping[tuple[int, int], int],
) -> Bucket:
    shared: Exchange | None = None
    leaves = list(members)
    if domain is not None:
        shardings = [leaf.sharding for leaf in members if leaf.sharding is not None]
        shared = exchange(domain, shardings, [owner_of[leaf.path] for leaf in members])
        leaves = [members[i] for i in shared.owned]
    by_shape: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        blocks = product(_ranges(leaf.view.row_blocks), _ranges(leaf.view.column_blocks))
        for position, (rows, columns) in enumerate(blocks):
            fan_out, fan_in = _length(rows), _length(columns)
            shape = min(fan_out, fan_in), max(fan_out, fan_in)
            tall, count = fan_out > fan_in, leaf.view.count
            by_shape[shape].append(Piece(index, position, rows, columns, tall, count))
    stacks = tuple(
        StackPlan(
            *shape,
            total=totals[shape],
            pieces=tuple(pieces),
            counts=tuple(piece.count for piece in pieces),
            paths=tuple(leaves[piece.leaf].path for piece in pieces for _ in range(piece.count)),
            scales=tuple(
                leaves[piece.leaf].view.multiplier(
                    scale, _length(piece.rows), _length(piece.columns)
                )
                for piece in pieces
                for _ in range(piece.count)
            ),
            chunk=max(1, max_bytes // (shape[0] * shape[1] * leaves[0].dtype.itemsize)),
        )
        for shape, pieces in by_shape.items()
    )
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for leaf in members:
        shape = leaf.view.shape if leaf.sharding is None else leaf.sharding.local_shape
        groups[together(leaf.path, shape)].append(leaf.path)
    return Bucket(
        tuple(leaf.path for leaf in members),
        tuple(map(tuple, groups.values())),
        tuple(leaves),
        stacks,
        members[0].dtype,
        members[0].device,
        shared,
    )


def together(path: str, shape: tuple[int, ...]) -> tuple[object, ...]:
    """Leaves with an equal key share their pointwise work: small ones of one shape."""
    # Copying a large leaf into a stack costs more than a call of its own.
    return (shape, path) if math.prod(shape) > SMALL else (shape,)


def _ranges(blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = list(accumulate(blocks))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def stack(bucket: Bucket, leaves: Sequence[Tensor]) -> list[Stack]:
    """The stacks of a bucket in its dtype, from leaves in their native shapes and any strides."""
    views = [
        leaf.permute(spec.view.order).reshape(spec.view.count, spec.view.fan_out, spec.view.fan_in)
        for leaf, spec in zip(leaves, bucket.leaves, strict=True)
    ]
    stacks: list[Stack] = []
    for spec in bucket.stacks:
        wide: list[Tensor] = []
        for piece in spec.pieces:
            block = views[piece.leaf][:, slice(*piece.rows), slice(*piece.columns)]
            wide.append(block.mT if piece.tall else block)
        stacks.append(_concatenate(wide, 0).to(bucket.dtype))
    return stacks


def unstack(bucket: Bucket, stacks: Sequence[Stack]) -> list[Tensor]:
    """Back to the leaves' native shapes, blocks at their places; views where that is possible."""
    blocks: list[dict[int, Tensor]] = [{} for _ in bucket.leaves]
    for spec, stacked in zip(bucket.stacks, stacks, strict=True):
        for piece, wide in zip(spec.pieces, stacked.split(list(spec.counts)), strict=True):
            blocks[piece.leaf][piece.position] = wide.mT if piece.tall else wide
    return [_native(leaf.view, own) for leaf, own in zip(bucket.leaves, blocks, strict=True)]


def _native(view: View, blocks: dict[int, Tensor]) -> Tensor:
    """Blocks by row-major position -> the leaf in its native shape."""
    width = len(view.column_blocks)
    rows = [
        _concatenate([blocks[start + column] for column in range(width)], 2)
        for start in range(0, len(blocks), width)
    ]
    permuted = _concatenate(rows, 1).reshape([view.shape[axis] for axis in view.order])
    return permuted.permute([view.order.index(axis) for axis in range(len(view.order))])


def _concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    # cat copies even when there is nothing to join.
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
