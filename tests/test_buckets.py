# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import matrix_views

from fmuon import Matrix
from fmuon.buckets import MatrixLeaf, plan, stack, unstack
from fmuon.scaling import none, original

CPU = torch.device("cpu")
UNLIMITED = 2**40

several_leaves = st.lists(matrix_views(), min_size=1, max_size=6)


def planned(cases, scale=none, limit=UNLIMITED, dtype=torch.float32):
    """The buckets of leaves given as path -> (matrix, shape)."""
    leaves = [
        MatrixLeaf(path, matrix.view(path, shape), dtype, CPU)
        for path, (matrix, shape) in cases.items()
    ]
    return plan(leaves, scale, limit)


def named(cases):
    return {f"leaf{index}": case for index, case in enumerate(cases)}


def numbered(cases):
    """Leaves whose elements are all different."""
    sizes = [math.prod(shape) for _, shape in cases.values()]
    elements = torch.arange(float(sum(sizes))).split(sizes)
    return {
        path: part.reshape(shape)
        for (path, (_, shape)), part in zip(cases.items(), elements, strict=True)
    }


def stacks_of(bucket, leaves):
    return stack(bucket, [leaves[path] for path in bucket.paths])


# ---- there and back ------------------------------------------------------------------------------


@given(several_leaves)
def test_unstacking_the_stacks_gives_back_the_leaves(cases):
    cases = named(cases)
    leaves = numbered(cases)
    for bucket in planned(cases):
        back = unstack(bucket, stacks_of(bucket, leaves))
        for path, leaf in zip(bucket.paths, back, strict=True):
            assert torch.equal(leaf, leaves[path])


@given(several_leaves, st.randoms(use_true_random=False))
def test_the_strides_of_a_leaf_do_not_matter(cases, random):
    cases = named(cases)
    leaves = numbered(cases)
    strided = {}
    for path, leaf in leaves.items():
        order = random.sample(range(leaf.ndim), leaf.ndim)
        inverse = [order.index(axis) for axis in range(leaf.ndim)]
        strided[path] = leaf.permute(order).contiguous().permute(inverse)
    for bucket in planned(cases):
        for plain, other in zip(stacks_of(bucket, leaves), stacks_of(bucket, strided), strict=True):
            assert torch.equal(plain, other)


def test_a_channels_last_convolution_is_stacked_as_a_contiguous_one():
    cases = {"conv": (Matrix(0, (1, 2, 3)), (4, 3, 2, 2))}
    weight = torch.randn(4, 3, 2, 2)
    (bucket,) = planned(cases)
    (stacked,) = stack(bucket, [weight.to(memory_format=torch.channels_last)])
    assert torch.equal(stacked, weight.reshape(1, 4, 12))


@given(several_leaves)
def test_every_element_is_in_one_stack_once(cases):
    cases = named(cases)
    leaves = numbered(cases)
    stacked = [x for bucket in planned(cases) for x in stacks_of(bucket, leaves)]
    elements = torch.cat([x.flatten() for x in stacked]).sort().values
    assert torch.equal(elements, torch.arange(float(elements.numel())))


@given(several_leaves)
def test_every_stack_has_wide_matrices_of_the_planned_shape(cases):
    cases = named(cases)
    leaves = numbered(cases)
    for bucket in planned(cases):
        for spec, x in zip(bucket.stacks, stacks_of(bucket, leaves), strict=True):
            assert x.shape == (sum(spec.counts), spec.short, spec.long)
            assert spec.short <= spec.long


@given(several_leaves)
def test_a_bucket_has_one_stack_per_shape(cases):
    for bucket in planned(named(cases)):
        shapes = [(spec.short, spec.long) for spec in bucket.stacks]
        assert len(set(shapes)) == len(shapes)


@given(several_leaves)
def test_no_shape_is_in_two_buckets_where_size_is_no_limit(cases):
    buckets = planned(named(cases))
    shapes = [(spec.short, spec.long) for bucket in buckets for spec in bucket.stacks]
    assert len(set(shapes)) == len(shapes)


# ---- what is in a stack --------------------------------------------------------------------------


def only_stack(cases, leaves):
    (bucket,) = planned(cases)
    (stacked,) = stacks_of(bucket, leaves)
    return stacked


def test_a_tall_matrix_is_stored_transposed():
    leaves = {"w": torch.randn(6, 4)}
    assert torch.equal(only_stack({"w": (Matrix(), (6, 4))}, leaves), leaves["w"].mT[None])


def test_matrices_of_one_shape_share_a_stack_whatever_their_orientation():
    leaves = {"kernel": torch.randn(4, 6), "tall": torch.randn(6, 4), "wide": torch.randn(4, 6)}
    cases = {
        "kernel": (Matrix(1, 0), (4, 6)),
        "tall": (Matrix(), (6, 4)),
        "wide": (Matrix(), (4, 6)),
    }
    expected = torch.stack([leaves["kernel"], leaves["tall"].mT, leaves["wide"]])
    assert torch.equal(only_stack(cases, leaves), expected)


def test_experts_are_matrices_of_their_own():
    leaves = {"experts": torch.randn(3, 4, 6)}
    stacked = only_stack({"experts": (Matrix(1, 2), (3, 4, 6))}, leaves)
    assert torch.equal(stacked, leaves["experts"])


def test_row_blocks_join_the_stack_of_other_leaves():
    leaves = {"output": torch.randn(4, 4), "qkv": torch.randn(12, 4)}
    cases = {"output": (Matrix(), (4, 4)), "qkv": (Matrix(blocks=(4, 4, 4)), (12, 4))}
    expected = torch.stack([leaves["output"], *leaves["qkv"].split(4)])
    assert torch.equal(only_stack(cases, leaves), expected)


def test_column_blocks_are_matrices_of_their_own():
    leaves = {"heads": torch.randn(4, 12)}
    stacked = only_stack({"heads": (Matrix(blocks_in=(6, 6)), (4, 12))}, leaves)
    assert torch.equal(stacked, torch.stack(leaves["heads"].split(6, dim=1)))


def test_blocks_of_a_stack_axis_are_taken_from_every_matrix():
    leaves = {"experts": torch.randn(3, 8, 6)}
    stacked = only_stack({"experts": (Matrix(1, 2, blocks=(4, 4)), (3, 8, 6))}, leaves)
    assert torch.equal(stacked, torch.cat(leaves["experts"].split(4, dim=1)))


def test_leaves_linked_by_the_blocks_of_a_third_are_in_one_bucket():
    cases = {
        "a": (Matrix(), (2, 4)),
        "b": (Matrix(), (3, 4)),
        "c": (Matrix(), (5, 5)),
        "both": (Matrix(blocks=(2, 3)), (5, 4)),
    }
    assert sorted(bucket.paths for bucket in planned(cases)) == [("a", "b", "both"), ("c",)]


def test_leaves_of_different_dtypes_are_in_different_buckets():
    view = Matrix().view("w", (4, 6))
    leaves = [
        MatrixLeaf("single", view, torch.float32, CPU),
        MatrixLeaf("double", view, torch.float64, CPU),
        MatrixLeaf("elsewhere", view, torch.float32, torch.device("meta")),
    ]
    assert len(plan(leaves, none, UNLIMITED)) == 3


def test_a_stack_has_the_dtype_of_the_arithmetic():
    (bucket,) = planned({"w": (Matrix(), (4, 6))}, dtype=torch.float64)
    leaf = torch.randn(4, 6)
    (stacked,) = stack(bucket, [leaf])
    assert stacked.dtype == torch.float64 and torch.equal(stacked, leaf.double()[None])


# ---- owners and scales of the matrices -----------------------------------------------------------


@given(several_leaves)
def test_every_matrix_of_a_stack_is_listed_under_its_leaf(cases):
    cases = named(cases)
    leaves = {path: torch.full(shape, float(path[4:])) for path, (_, shape) in cases.items()}
    for bucket in planned(cases):
        for spec, x in zip(bucket.stacks, stacks_of(bucket, leaves), strict=True):
            owners = torch.tensor([float(path[4:]) for path in spec.paths])
            assert torch.equal(x, owners[:, None, None].expand_as(x))


@given(several_leaves)
def test_every_matrix_has_the_scale_of_its_own_sides(cases):
    cases = named(cases)
    for bucket in planned(cases, lambda fan_out, fan_in: 100 * fan_out + fan_in):
        for spec in bucket.stacks:
            sides = {(100 * a + b) for a, b in [(spec.short, spec.long), (spec.long, spec.short)]}
            assert set(spec.scales) <= sides and len(spec.scales) == len(spec.paths)


def test_unequal_blocks_have_scales_of_their_own():
    cases = {"w": (Matrix(blocks=(2, 16, 8)), (26, 4))}
    (bucket,) = planned(cases, original)
    scales = {(spec.short, spec.long): spec.scales for spec in bucket.stacks}
    assert scales == {(2, 4): (1.0,), (4, 16): (2.0,), (4, 8): (math.sqrt(2),)}


def test_a_tall_and_a_wide_matrix_of_one_stack_keep_their_scales():
    (bucket,) = planned({"tall": (Matrix(), (16, 4)), "wide": (Matrix(), (4, 16))}, original)
    assert dict(zip(bucket.stacks[0].paths, bucket.stacks[0].scales, strict=True)) == {
        "tall": 2.0,
        "wide": 1.0,
    }


def test_a_stack_axis_repeats_the_scale_of_its_leaf():
    (bucket,) = planned({"experts": (Matrix(1, 2), (3, 16, 4))}, original)
    assert bucket.stacks[0].scales == (2.0, 2.0, 2.0)


# ---- the plan ------------------------------------------------------------------------------------


@given(several_leaves, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_the_leaves(cases, random):
    cases = named(cases)
    shuffled = dict(random.sample(list(cases.items()), len(cases)))
    for limit in (64, UNLIMITED):
        assert planned(shuffled, limit=limit) == planned(cases, limit=limit)


@given(several_leaves)
def test_equal_plans_hash_alike(cases):
    cases = named(cases)
    assert len({planned(cases, original), planned(cases, original)}) == 1


@given(several_leaves, st.integers(1, 300))
def test_every_leaf_is_in_one_bucket_once_whatever_the_limit(cases, limit):
    cases = named(cases)
    paths = [path for bucket in planned(cases, limit=limit) for path in bucket.paths]
    assert sorted(paths) == sorted(cases)


@given(several_leaves, st.integers(1, 300))
def test_only_a_single_leaf_may_exceed_the_limit(cases, limit):
    cases = named(cases)
    for bucket in planned(cases, limit=limit):
        used = sum(4 * math.prod(cases[path][1]) for path in bucket.paths)
        assert used <= limit or len(bucket.paths) == 1


@pytest.mark.parametrize(("limit", "buckets"), [(96, 6), (191, 6), (192, 3), (UNLIMITED, 1)])
def test_equal_leaves_fill_their_buckets_up_to_the_limit(limit, buckets):
    # 24 elements of 4 bytes each.
    cases = named([(Matrix(), (4, 6))] * 6)
    assert len(planned(cases, limit=limit)) == buckets


def test_the_limit_counts_bytes_of_the_dtype_of_the_arithmetic():
    cases = named([(Matrix(), (4, 6))] * 6)
    assert len(planned(cases, limit=192, dtype=torch.float64)) == 6


def test_the_limit_counts_every_matrix_of_a_stack_axis():
    cases = named([(Matrix(1, 2), (2, 4, 6))] * 3)
    assert len(planned(cases, limit=2 * 96)) == 3


def test_in_place_stacks_stay_small_beside_many_leaves():
    def counts(rows, leaves, in_place):
        view = Matrix().view("w", (rows, 512))
        leaves = [MatrixLeaf(f"w{i:02}", view, torch.float32, CPU) for i in range(leaves)]
        buckets = plan(leaves, none, None, in_place=in_place)
        return [sum(sum(spec.counts) for spec in bucket.stacks) for bucket in buckets]

    assert counts(256, leaves=64, in_place=False) == [64]
    assert counts(256, leaves=64, in_place=True) == [3] * 21 + [1]
    # Small ones are stacked whatever share of the whole they are.
    assert counts(128, leaves=3, in_place=True) == [2, 1]
