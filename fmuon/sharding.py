# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a sharded leaf live and who orthogonalises it; integers only.

A mesh is a grid of ranks. Along each of its dimensions a leaf is either split (one of its axes is
cut into parts) or replicated. The ranks that differ in split dimensions only hold one whole leaf
between them, a shard group; those that differ in the others hold copies, a replica group. A leaf
has one owner in the whole mesh, who gets it whole, orthogonalises it and sends the parts back.
"""

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Block: TypeAlias = tuple[Interval, ...]
"""(start, stop) for every axis of a leaf."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """A grid of ranks as one of them sees it; compared by identity, since it may be large.

    Attributes:
        shape: of the grid.
        ranks: the global rank at every coordinate, row-major.
        coordinate: of this rank.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...]

    def index(self, place: Sequence[int]) -> int:
        """Row-major index of a coordinate."""
        index = 0
        for size, own in zip(self.shape, place, strict=True):
            index = index * size + own
        return index

    def places(self, dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Coordinates that differ from this rank's in some dimensions only, row-major."""
        return product(
            *(range(n) if d in dims else (self.coordinate[d],) for d, n in enumerate(self.shape))
        )

    def members(self, dims: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Rank -> coordinate of those places, by rank."""
        return dict(sorted((self.ranks[self.index(place)], place) for place in self.places(dims)))


@dataclass(frozen=True)
class Split:
    """One axis of a leaf, cut along one dimension of the mesh.

    `minor`: the cut is within the parts that the dimensions to its right make of the same axis, as
    in fully_shard of a tensor that is sharded already.
    """

    axis: int
    minor: bool = False


@dataclass(frozen=True)
class Sharding:
    """A leaf of `shape` on a mesh: one `Split`, or None for a replica, per mesh dimension."""

    shape: tuple[int, ...]
    mesh: Mesh
    splits: tuple[Split | None, ...]

    @property
    def split_dims(self) -> tuple[int, ...]:
        """Mesh dimensions along which the leaf is split into parts."""
        return tuple(d for d, split in enumerate(self.splits) if split and self.mesh.shape[d] > 1)

    @property
    def replica_dims(self) -> tuple[int, ...]:
        """Mesh dimensions along which it is copied."""
        split = self.split_dims
        return tuple(d for d, n in enumerate(self.mesh.shape) if n > 1 and d not in split)

    def block(self, coordinate: Sequence[int]) -> Block:
        """The part that the rank at a coordinate holds; each cut is into ceil(length / size)."""
        intervals: list[Interval] = [(0, length) for length in self.shape]
        major_first: list[int] = []
        for dim in reversed(range(len(self.splits))):
            split = self.splits[dim]
            if split is not None:
                major_first.insert(len(major_first) if split.minor else 0, dim)
        for dim in major_first:
            split = self.splits[dim]
            assert split is not None
            start, stop = intervals[split.axis]
            size = -(-(stop - start) // self.mesh.shape[dim])
            first = min(start + coordinate[dim] * size, stop)
            intervals[split.axis] = first, min(first + size, stop)
        return tuple(intervals)

    @property
    def own(self) -> Block:
        """The part that this rank holds."""
        return self.block(self.mesh.coordinate)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return _shape(self.own)

    @property
    def domain(self) -> "Domain | None":
        """The ranks that share this leaf's work; None where this rank has it alone."""
        if not self.split_dims and not self.replica_dims:
            return None
        return _domain(self.mesh, self.split_dims, self.replica_dims)

    def parts(self) -> tuple[Block, ...]:
        """The parts of the members of this rank's shard group, in the order of their ranks."""
        return tuple(map(self.block, self.mesh.members(self.split_dims).values()))

    def within(self, axes: Sequence[int]) -> "Sharding":
        """This rank's part as a leaf of its own with regard to cuts along some axes.

        Where those are axes of a stack of matrices, every rank has whole matrices.
        """
        own = self.own
        kept = [d for d, split in enumerate(self.splits) if not split or split.axis not in axes]
        lengths = [
            stop - start if axis in axes else length
            for axis, ((start, stop), length) in enumerate(zip(own, self.shape, strict=True))
        ]
        mesh = _along(self.mesh, tuple(kept))
        return Sharding(tuple(lengths), mesh, tuple(self.splits[d] for d in kept))

    def on(self, mesh: Mesh) -> "Sharding":
        """The same leaf on a mesh that this one is a part of: copied along the other dimensions.

        A mesh that isn't keeps what it has.
        """
        for dims in combinations(range(len(mesh.shape)), len(self.mesh.shape)):
            if _along(mesh, dims).ranks == self.mesh.ranks:
                splits = dict(zip(dims, self.splits, strict=True))
                every = tuple(splits.get(dim) for dim in range(len(mesh.shape)))
                return Sharding(self.shape, mesh, every)
        return self


def grid(*shape: int) -> Mesh:
    """The mesh of that shape as rank 0 sees it; none of the ranks need exist."""
    return Mesh(shape, tuple(range(prod(shape))), (0,) * len(shape))


@functools.cache
def _along(mesh: Mesh, dims: tuple[int, ...]) -> Mesh:
    """The mesh of the ranks that differ from this one in some dimensions only."""
    if dims == tuple(range(len(mesh.shape))):
        return mesh
    return Mesh(
        tuple(mesh.shape[d] for d in dims),
        tuple(mesh.ranks[mesh.index(place)] for place in mesh.places(dims)),
        tuple(mesh.coordinate[d] for d in dims),
    )


@functools.cache
def _domain(mesh: Mesh, split_dims: tuple[int, ...], replica_dims: tuple[int, ...]) -> "Domain":
    rows = [replace(mesh, coordinate=place) for place in mesh.places(replica_dims)]
    ranks = tuple(
        tuple(mesh.ranks[mesh.index(place)] for place in row.places(split_dims)) for row in rows
    )
    own = mesh.ranks[mesh.index(mesh.coordinate)]
    copy = next(index for index, row in enumerate(ranks) if own in row)
    return Domain(ranks, copy, ranks[copy].index(own))


@dataclass(frozen=True)
class Domain:
    """Ranks that share the work for some leaves, as one of them sees it.

    Attributes:
        ranks: one row per replica: the ranks that hold a leaf between them, its shard group. In
            the order of the mesh, which need not count its ranks in order.
        copy, part: the row and the place in it of this rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    copy: int
    part: int

    @property
    def parts(self) -> tuple[int, ...]:
        """The shard group of this rank, by rank."""
        return tuple(sorted(self.ranks[self.copy]))

    @property
    def copies(self) -> tuple[int, ...]:
        """Its replica group, by rank: those that hold the same part of a leaf."""
        return tuple(sorted(row[self.part] for row in self.ranks))

    @property
    def workers(self) -> int:
        """How many ranks there are; worker w is in copy w mod copies."""
        return len(self.ranks) * len(self.ranks[0])

    def owned_by(self, worker: int) -> tuple[int, int]:
        """(copy, part) of a worker: neighbours in the list are in different replicas."""
        return worker % len(self.ranks), worker // len(self.ranks)


@dataclass(frozen=True)
class Groups:
    """The groups of a rank in a domain, as fields: a trace can't ask a constant's properties."""

    parts: tuple[int, ...]
    copies: tuple[int, ...]
    part: int
    copy: int


@dataclass(frozen=True)
class Exchange:
    """How the leaves of a bucket get to their owners and back, by their places in the bucket.

    Attributes:
        domain: the groups that take part.
        shapes: the local shape of every leaf.
        owned: leaves of this rank.
        sent: for every member of the shard group the leaves that it owns in this replica.
        parts: for every leaf of this rank the parts of all members of its shard group.
        copied: for every member of the replica group the leaves that are owned in it.
    """

    domain: Groups
    shapes: tuple[tuple[int, ...], ...]
    owned: tuple[int, ...]
    sent: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[Block, ...], ...]
    copied: tuple[tuple[int, ...], ...]


def exchange(domain: Domain, leaves: Sequence[Sharding], owners: Sequence[int]) -> Exchange:
    """The exchange of some leaves that have the same domain; owners are its workers."""
    places = [domain.owned_by(owner) for owner in owners]
    row, column = domain.ranks[domain.copy], [other[domain.part] for other in domain.ranks]
    own = row[domain.part]
    sent = tuple(
        tuple(i for i, place in enumerate(places) if place == (domain.copy, row.index(rank)))
        for rank in domain.parts
    )
    copied = tuple(
        tuple(i for i, place in enumerate(places) if place[0] == column.index(rank))
        for rank in domain.copies
    )
    groups = Groups(domain.parts, domain.copies, domain.parts.index(own), domain.copies.index(own))
    owned = sent[groups.part]
    shapes = tuple(leaf.local_shape for leaf in leaves)
    return Exchange(groups, shapes, owned, sent, tuple(leaves[i].parts() for i in owned), copied)


def _shape(block: Block) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in block)


def elements(block: Block) -> int:
    """How many a part has."""
    return prod(_shape(block))


def balanced(costs: Sequence[float], workers: int) -> list[int]:
    """A worker for every cost: the largest first, each to the worker with the least so far.

    [Graham 1969, "Bounds on multiprocessing timing anomalies", LPT: within 4/3 of the optimum]
    """
    loads = [(0.0, worker) for worker in range(workers)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, worker = loads[0]
        owners[index] = worker
        heapq.heapreplace(loads, (load + costs[index], worker))
    return owners
