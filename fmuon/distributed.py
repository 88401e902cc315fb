# SPDX-License-Identifier: Apache-2.0
"""Sharded training: what has to be done before a trace, and who does what.

DTensor leaves (fully_shard, tensor parallelism, or both) need nothing but this module's `prepare`
before a compiled update; for plain tensors that are the same on several ranks, as under DDP, say
`fmuon.muon(mesh=...)`. Each matrix is orthogonalised on one rank of its mesh.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fmuon.base import ConfigurationError, Transformation, Tree
from fmuon.buckets import MatrixLeaf, assigned, cost
from fmuon.collectives import register
from fmuon.functional import Muon, configuration_of
from fmuon.methods import flops_of
from fmuon.partition import Assignment
from fmuon.sharding import Domain, Mesh, elements, grid
from fmuon.tree import flatten


def prepare(opt: Transformation, params: Tree) -> None:
    """Make the process groups of an update, and check that all ranks have the same leaves.

    To be called on all ranks before an update of sharded leaves is compiled, also after a state was
    loaded; `opt.init` and `FMuon` call it.

    Raises:
        StateError: names the first leaf of which two ranks say different things.
    """
    configuration_of(opt).prepare(params)


# Lines of a table of ranks.
_SHOWN = 16


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
        """One line for each of the first ranks, and a summary of all."""
        lines = ["rank  leaves       Gflop       MB sent"]
        lines += [
            f"{s.rank:4}  {len(s.leaves):6}  {s.flops / 1e9:10.3f}  {s.sent / 1e6:12.3f}"
            for s in self.ranks[:_SHOWN]
        ]
        if len(self.ranks) > _SHOWN:
            lines.append(f" and {len(self.ranks) - _SHOWN} more ranks")
        summary = f"busiest over mean: {self.imbalance:.3f} flops, {self.sent_imbalance:.3f} bytes"
        return "\n".join([*lines, "", summary])


def plan(opt: Transformation, params: Tree, mesh: Any = None) -> Shares:
    """Who orthogonalises which leaves, and what that costs each rank of this rank's meshes.

    Args:
        opt: the update, or an `FMuon`.
        params: its leaves.
        mesh: on which plain leaves are to be thought of as sharded by `fully_shard`: a number of
            ranks or (replicas, shards), for which no process group is needed, or a DeviceMesh.

    Stacks that are cut along the stack, as experts are, stay where they are: those matrices are
    everyone's own and are not counted.
    """
    config, (leaves, _) = configuration_of(opt), flatten(params)
    return shares_of(config, leaves, config.assign(leaves), mesh)


def shares_of(
    config: Muon,
    leaves: Mapping[str, Tensor | None],
    assignments: Mapping[str, Assignment],
    mesh: Any,
) -> Shares:
    """The same for leaves that are assigned already."""
    found = config.shared_leaves(leaves, assignments, None if mesh is None else _mesh(mesh))
    return shares(found, flops_of(config.orthogonalize))


def _mesh(mesh: Any) -> Mesh:
    sizes = (mesh,) if isinstance(mesh, int) else mesh
    if not isinstance(sizes, tuple):
        return register(mesh)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigurationError(
            f"mesh={mesh!r}: give a number of ranks, (replicas, shards), or a DeviceMesh"
        )
    return grid(*sizes)


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
