# SPDX-License-Identifier: Apache-2.0
"""Sharded training: what has to be done before a trace, and who does what.

DTensor leaves (fully_shard, tensor parallelism, or both) need nothing but this module's `prepare`
before a compiled update; for plain tensors that are the same on several ranks, as under DDP, say
`fmuon.muon(mesh=...)`. Each matrix is orthogonalised on one rank of its mesh.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fmuon.base import Transformation, Tree
from fmuon.buckets import MatrixLeaf, assigned, cost
from fmuon.functional import configuration_of
from fmuon.orthogonalize import flops_of
from fmuon.sharding import Domain, elements


def prepare(opt: Transformation, params: Tree) -> None:
    """Make the process groups of an update, and check that all ranks have the same leaves.

    To be called on all ranks before an update of sharded leaves is compiled, also after a state was
    loaded; `opt.init` and `FMuon` call it.

    Raises:
        StateError: names the first leaf of which two ranks say different things.
    """
    configuration_of(opt).prepare(params)


@dataclass(frozen=True)
class Share:
    """What one rank does in a step: leaves it orthogonalises, flops of that, bytes it sends."""

    rank: int
    leaves: tuple[str, ...]
    flops: float
    sent: int


@dataclass(frozen=True)
class Shares:
    """The shares of all ranks; printing it gives a table."""

    ranks: tuple[Share, ...]

    @property
    def imbalance(self) -> float:
        """Flops of the busiest rank over the mean."""
        return _over_mean([share.flops for share in self.ranks])

    @property
    def sent_imbalance(self) -> float:
        """Bytes that the busiest sender sends over the mean."""
        return _over_mean([share.sent for share in self.ranks])

    def __str__(self) -> str:
        """One line per rank, and a summary."""
        lines = ["rank  leaves       Gflop       MB sent"]
        lines += [
            f"{s.rank:4}  {len(s.leaves):6}  {s.flops / 1e9:10.3f}  {s.sent / 1e6:12.3f}"
            for s in self.ranks
        ]
        summary = f"busiest over mean: {self.imbalance:.3f} flops, {self.sent_imbalance:.3f} bytes"
        return "\n".join([*lines, "", summary])


def plan(opt: Transformation, params: Tree) -> Shares:
    """Who orthogonalises which leaves, and what that costs each rank of this rank's meshes."""
    config = configuration_of(opt)
    return shares(config.shared_leaves(params), flops_of(config.orthogonalize))


def shares(leaves: Sequence[MatrixLeaf], flops: Callable[[int, int], float]) -> Shares:
    """The same for leaves that are described only, on a mesh of any size."""
    owned: dict[int, list[str]] = defaultdict(list)
    work: dict[int, float] = defaultdict(float)
    sent: dict[int, int] = defaultdict(int)
    for domain, group, owner_of in assigned(leaves, flops):
        assert domain is not None
        sizes: dict[tuple[object, ...], list[int]] = {}
        for leaf in group:
            assert leaf.sharding is not None
            key = leaf.sharding.shape, leaf.sharding.splits
            if key not in sizes:
                by_rank = dict(zip(domain.parts, leaf.sharding.parts(), strict=True))
                sizes[key] = [elements(by_rank[rank]) for rank in domain.ranks[domain.copy]]
            part_sizes = [size * leaf.dtype.itemsize for size in sizes[key]]
            owner = _rank(domain, owner_of[leaf.path])
            owned[owner].append(leaf.path)
            work[owner] += cost(leaf, flops)
            for rank, count in _sent(domain, owner_of[leaf.path], part_sizes):
                sent[rank] += count
        for worker in range(domain.workers):
            owned[_rank(domain, worker)] += []
    return Shares(tuple(Share(r, tuple(owned[r]), work[r], sent[r]) for r in sorted(owned)))


def _sent(domain: Domain, worker: int, sizes: list[int]) -> list[tuple[int, int]]:
    """(rank, bytes) of what every rank sends for one leaf, whose parts have these sizes."""
    copy, part = domain.owned_by(worker)
    copies = len(domain.ranks)
    row = domain.ranks[copy]
    there = [
        (rank, size) for p, (rank, size) in enumerate(zip(row, sizes, strict=True)) if p != part
    ]
    back = [(row[part], sum(sizes) - sizes[part])]
    to_replicas = [(rank, size * (copies - 1)) for rank, size in zip(row, sizes, strict=True)]
    return there + back + to_replicas


def _rank(domain: Domain, worker: int) -> int:
    copy, part = domain.owned_by(worker)
    return domain.ranks[copy][part]


def _over_mean(values: Sequence[float]) -> float:
    mean = sum(values) / max(1, len(values))
    return max(values, default=0.0) / mean if mean else 1.0
