# SPDX-License-Identifier: Apache-2.0
"""The laws of plans, in integers: no process group, any number of ranks."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from fmuon.base import Matrix
from fmuon.buckets import MatrixLeaf, assigned, plan
from fmuon.distributed import shares
from fmuon.methods import flops_of
from fmuon.orthogonalize import NewtonSchulz
from fmuon.scaling import scale_rule
from fmuon.sharding import Mesh, Sharding, Split, balanced, elements, exchange, grid

SCALE = scale_rule("match_rms_adamw")


def coordinates(grid):
    return list(product(*map(range, grid)))


def sharding(shape, grid, splits, coordinate=None, ranks=None):
    ranks = tuple(range(prod(grid))) if ranks is None else ranks
    return Sharding(shape, Mesh(grid, ranks, coordinate or (0,) * len(grid)), splits)


def placement(split):
    return Replicate() if split is None else Shard(split.axis)


@st.composite
def cases(draw):
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    axis = st.integers(0, len(shape) - 1)
    splits = tuple(draw(st.one_of(st.none(), st.builds(Split, axis))) for _ in grid)
    ranks = tuple(draw(st.permutations(range(prod(grid)))))
    return shape, grid, splits, ranks


def blocks_of(shape, grid, splits, placements):
    """(ours, torch's) block of the rank at every coordinate."""
    leaf = sharding(shape, grid, splits)
    for coordinate in coordinates(grid):
        lengths, starts = _compute_local_shape_and_global_offset(
            torch.Size(shape), grid, list(coordinate), placements
        )
        yield (
            leaf.block(coordinate),
            tuple((s, s + n) for s, n in zip(starts, lengths, strict=True)),
        )


@given(cases())
def test_blocks_are_those_of_torch(case):
    shape, grid, splits, _ = case
    for ours, theirs in blocks_of(shape, grid, splits, [placement(s) for s in splits]):
        # Where nothing is left torch's offset may be anywhere.
        assert ours == theirs or elements(ours) == prod(b - a for a, b in theirs) == 0


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1)
)
def test_blocks_of_a_cut_within_the_parts_of_another_are_those_of_torch(a, b, times, other, axis):
    shape = (a * b * times, other) if axis == 0 else (other, a * b * times)
    splits = Split(axis, minor=True), Split(axis)
    placements = [_StridedShard(axis, split_factor=b), Shard(axis)]
    for ours, theirs in blocks_of(shape, (a, b), splits, placements):
        assert ours == theirs


@pytest.mark.parametrize("rows", [16, 14, 13, 7, 6, 5, 3, 1])
def test_uneven_cuts_within_the_parts_of_another_are_those_of_torch_on_a_2_by_2_grid(rows):
    splits = Split(0, minor=True), Split(0)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    for ours, theirs in blocks_of((rows, 3), (2, 2), splits, placements):
        assert ours == theirs or elements(ours) == prod(b - a for a, b in theirs) == 0


@given(cases())
def test_the_parts_of_a_shard_group_tile_the_leaf(case):
    shape, grid, splits, ranks = case
    for coordinate in coordinates(grid):
        count = torch.zeros(shape, dtype=torch.int64)
        for block in sharding(shape, grid, splits, coordinate, ranks).parts():
            count[tuple(slice(*interval) for interval in block)] += 1
        assert bool((count == 1).all())


@given(cases())
def test_every_rank_is_at_its_place_in_the_domain(case):
    shape, grid, splits, ranks = case
    found = set()
    for index, coordinate in enumerate(coordinates(grid)):
        domain = sharding(shape, grid, splits, coordinate, ranks).domain
        if domain is None:
            assert prod(grid) == 1
            continue
        assert domain.ranks[domain.copy][domain.part] == ranks[index]
        assert list(domain.parts) == sorted(domain.ranks[domain.copy])
        assert domain.workers == prod(grid)
        found.add((domain.copy, domain.part, domain.ranks))
    # All see the same grid, each from a place of its own.
    assert len(found) in (0, prod(grid)) and len({grid for *_, grid in found}) <= 1


@given(cases(), st.integers(1, 9))
def test_what_one_rank_sends_another_expects(case, leaves):
    shape, grid, splits, ranks = case
    by_rank = {}
    for index, coordinate in enumerate(coordinates(grid)):
        leaf = sharding(shape, grid, splits, coordinate, ranks)
        if leaf.domain is None:
            return
        owners = balanced([1.0] * leaves, leaf.domain.workers)
        by_rank[ranks[index]] = exchange(leaf.domain, [leaf] * leaves, owners)
    owned = [i for plan in by_rank.values() for i in plan.owned]
    assert sorted(owned) == list(range(leaves))
    for mine in by_rank.values():
        for there, sent in zip(mine.domain.parts, mine.sent, strict=True):
            theirs = by_rank[there]
            assert theirs.owned == sent
            for i, parts in zip(sent, theirs.parts, strict=True):
                assert elements(parts[mine.domain.part]) == prod(mine.shapes[i])
        assert sorted(i for group in mine.copied for i in group) == list(range(leaves))
        for there, copied in zip(mine.domain.copies, mine.copied, strict=True):
            assert by_rank[there].copied[by_rank[there].domain.copy] == copied


def best(costs, workers):
    """The least possible largest load, by trying all."""
    return min(
        max(sum(c for c, o in zip(costs, owners, strict=True) if o == w) for w in range(workers))
        for owners in product(range(workers), repeat=len(costs))
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_loads_are_within_four_thirds_of_the_best(costs, workers):
    owners = balanced(costs, workers)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == w) for w in range(workers)]
    assert sum(loads) == sum(costs)
    assert max(loads) <= (4 / 3 - 1 / (3 * workers)) * best(costs, workers) + 1e-9


def test_the_worst_case_of_graham_is_met_exactly():
    # 2m + 1 jobs of 2m - 1, 2m - 1, ..., m, m, m on m workers: 4m - 1 where 3m is possible.
    for m in (2, 3, 4, 7):
        costs = [c for size in range(2 * m - 1, m - 1, -1) for c in (size, size)] + [m]
        owners = balanced(costs, m)
        loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == w) for w in range(m)]
        assert max(loads) == 4 * m - 1


def leaves_of(grid, coordinate, shapes):
    for i, (rows, columns) in enumerate(shapes):
        leaf = sharding((rows, columns), grid, (None, Split(0)), coordinate)
        view = Matrix().view(str(i), (rows, columns))
        yield MatrixLeaf(str(i), view, torch.float32, torch.device("cpu"), leaf)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_all_ranks_have_the_same_buckets_in_one_order_and_each_leaf_one_owner(shapes):
    grid = (2, 3)
    seen = []
    owned = []
    for coordinate in coordinates(grid):
        leaves = list(leaves_of(grid, coordinate, shapes))
        buckets = plan(list(reversed(leaves)), SCALE, 64)
        seen.append([bucket.paths for bucket in buckets])
        owned += [leaf.path for bucket in buckets for leaf in bucket.leaves]
        for bucket in buckets:
            assert [leaf.path for leaf in bucket.leaves] == [
                bucket.paths[i] for i in bucket.exchange.owned
            ]
    assert all(order == seen[0] for order in seen)
    assert sorted(owned) == sorted(str(i) for i in range(len(shapes)))


def test_a_thousand_ranks_are_planned_at_once():
    shapes = [(64, 64), (64, 256), (256, 64)] * 40
    one, other = (
        plan(list(leaves_of((16, 64), at, shapes)), SCALE, None) for at in ((0, 0), (15, 63))
    )
    assert [bucket.paths for bucket in one] == [bucket.paths for bucket in other]
    for bucket in one:
        assert all(len(parts) == 64 for parts in bucket.exchange.parts)


def test_a_cut_along_the_stack_leaves_whole_matrices_on_every_rank():
    for coordinate, count in zip(coordinates((3,)), (2, 2, 1), strict=True):
        leaf = sharding((5, 4, 6), (3,), (Split(0),), coordinate).within([0])
        assert leaf.shape == leaf.local_shape == (count, 4, 6)
        assert leaf.domain is None


def test_copies_of_a_cut_stack_share_its_work_among_themselves_only():
    # Two dimensions of copies around the one of the cut.
    for coordinate in coordinates((2, 3, 2)):
        leaf = sharding((6, 4, 6), (2, 3, 2), (None, Split(0), None), coordinate)
        domain = leaf.within([0]).domain
        own = [6 * a + 2 * coordinate[1] + c for a in (0, 1) for c in (0, 1)]
        assert domain.copies == tuple(own)
        assert len(domain.parts) == 1


def test_what_a_rank_is_said_to_send_is_what_its_exchange_sends():
    """On a mesh that counts its ranks backwards, with parts of unequal size."""
    shapes, grid, order, flops = (
        ((5, 3), (3, 5), (7, 2)),
        (2, 2),
        (3, 2, 1, 0),
        flops_of(NewtonSchulz()),
    )
    for coordinate in coordinates(grid):
        leaves = leaves_on(shapes, grid, coordinate, order)
        ((domain, group, owner_of),) = assigned(leaves, flops)
        plan = exchange(domain, [x.sharding for x in group], [owner_of[x.path] for x in group])
        own, sizes = plan.domain.part, [prod(shape) for shape in plan.shapes]
        there = sum(sizes[i] for m, sent in enumerate(plan.sent) if m != own for i in sent)
        back = sum(elements(p) for parts in plan.parts for m, p in enumerate(parts) if m != own)
        copied = sum(sizes[i] for i in plan.copied[plan.domain.copy]) * (len(plan.copied) - 1)
        said = {share.rank: share.sent for share in shares(leaves, flops).ranks}
        rank = domain.ranks[domain.copy][domain.part]
        assert said[rank] == 4 * (there + back + copied) > 0


def leaves_on(shapes, grid, coordinate, order):
    splits = (None, Split(0))
    return [
        MatrixLeaf(
            str(index), Matrix().view("", shape), torch.float32, torch.device("cpu"),
            sharding(shape, grid, splits, coordinate, order),
        )
        for index, shape in enumerate(shapes)
    ]  # fmt: skip


# ---- leaves on a part of a mesh ------------------------------------------------------------------


@given(cases(), st.data())
def test_a_leaf_on_a_part_of_a_mesh_is_copied_along_the_rest(case, data):
    shape, sides, splits, ranks = case
    coordinate = tuple(data.draw(st.integers(0, side - 1)) for side in sides)
    whole = sharding(shape, sides, splits, coordinate, ranks)
    dims = data.draw(st.sets(st.integers(0, len(sides) - 1), min_size=1).map(sorted))
    part = Mesh(
        tuple(sides[d] for d in dims),
        tuple(whole.mesh.ranks[whole.mesh.index(place)] for place in whole.mesh.places(dims)),
        tuple(coordinate[d] for d in dims),
    )
    own = Sharding(shape, part, tuple(splits[d] for d in dims))
    on_all = own.on(whole.mesh)
    assert on_all.mesh is whole.mesh
    assert on_all.local_shape == own.local_shape
    cut = {on_all.mesh.shape[d] for d in on_all.split_dims}
    assert cut == {part.shape[d] for d in own.split_dims}
    # Every rank of the whole mesh is one of those that share the work.
    domain = on_all.domain
    everyone = prod(sides)
    assert (1 if domain is None else domain.workers) == everyone


def test_a_leaf_on_another_mesh_stays_there():
    diagonal = sharding((4, 6), (2,), (Split(0),), ranks=(0, 3))
    assert diagonal.on(grid(2, 2)) is diagonal
