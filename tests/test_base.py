# SPDX-License-Identifier: Apache-2.0
import dataclasses
import itertools
import math

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from strategies import matrix_views, refusal

from fmuon import ConfigurationError, FMuonError, LeafError, Matrix, StateError
from fmuon.base import lookup


def entry_by_entry(matrix, tensor):
    """[stack, row, column] of a leaf: each of the three counts its axes like an odometer."""

    def position(index, axes):
        place = 0
        for axis in axes:
            place = place * tensor.shape[axis] + index[axis]
        return place

    as_axes = [(a,) if isinstance(a, int) else a for a in (matrix.fan_out, matrix.fan_in)]
    rows, columns = ([axis % tensor.ndim for axis in axes] for axes in as_axes)
    stack = [axis for axis in range(tensor.ndim) if axis not in rows + columns]
    sizes = [math.prod(tensor.shape[axis] for axis in axes) for axes in (stack, rows, columns)]
    matrices = torch.empty(sizes)
    for index in itertools.product(*map(range, tensor.shape)):
        matrices[tuple(position(index, axes) for axes in (stack, rows, columns))] = tensor[index]
    return matrices


@given(matrix_views())
def test_permuting_by_order_and_reshaping_gives_the_matrices_that_the_axes_name(case):
    matrix, shape = case
    leaf = torch.arange(float(math.prod(shape))).reshape(shape)
    view = matrix.view("w", shape)
    matrices = leaf.permute(view.order).reshape(view.count, view.fan_out, view.fan_in)
    assert torch.equal(matrices, entry_by_entry(matrix, leaf))


@given(matrix_views())
def test_the_blocks_of_a_view_cover_its_fans(case):
    matrix, shape = case
    view = matrix.view("w", shape)
    assert view.row_blocks == (matrix.blocks or (view.fan_out,))
    assert view.column_blocks == (matrix.blocks_in or (view.fan_in,))
    assert (sum(view.row_blocks), sum(view.column_blocks)) == (view.fan_out, view.fan_in)


@pytest.mark.parametrize(
    ("matrix", "shape", "count", "fan_out", "fan_in"),
    [
        (Matrix(), (6, 4), 1, 6, 4),
        (Matrix(1, 0), (4, 6), 1, 6, 4),
        (Matrix(0, (1, 2, 3)), (8, 3, 5, 7), 1, 8, 105),
        (Matrix(1, 2), (2, 6, 4), 2, 6, 4),
        (Matrix(-1, -2), (2, 3, 4, 6), 6, 6, 4),
        (Matrix((0, -1), 1), (3, 5, 4), 1, 12, 5),
    ],
    ids=["linear", "input major", "convolution", "experts", "from the end", "two row axes"],
)
def test_the_number_and_the_sides_of_the_matrices(matrix, shape, count, fan_out, fan_in):
    view = matrix.view("w", shape)
    assert (view.count, view.fan_out, view.fan_in) == (count, fan_out, fan_in)


def test_lists_are_stored_as_tuples():
    listed = Matrix([0], [1, 2], blocks=[2, 2], blocks_in=[3])
    assert listed == Matrix((0,), (1, 2), blocks=(2, 2), blocks_in=(3,))
    assert hash(listed) == hash(Matrix((0,), (1, 2), blocks=(2, 2), blocks_in=(3,)))


def test_views_bound_to_equal_shapes_are_equal_and_hash_alike():
    views = {Matrix(1, 0).view(path, (4, 6)) for path in "ab"}
    assert len(views) == 1


def test_a_matrix_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Matrix().fan_out = 1


def test_an_axis_in_both_fans_is_refused():
    assert_expected_inline(
        refusal(LeafError, Matrix((0, 1), -1).view, "blocks.0.w", (6, 4)),
        """\
'blocks.0.w': axis 1 is named in both fan_out=(0, 1) and fan_in=-1; an axis is a
row axis, a column axis or a stack axis""",
    )


def test_an_axis_out_of_range_is_refused():
    assert_expected_inline(
        refusal(LeafError, Matrix(0, (1, 2)).view, "w", (6, 4)),
        """\
'w': fan_in=(1, 2) doesn't fit a leaf of shape (6, 4); name axes between -2 and
1, or label the leaf 'auxiliary'""",
    )


def test_no_axes_at_all_are_refused():
    assert_expected_inline(
        refusal(LeafError, Matrix(()).view, "w", (6, 4)),
        """\
'w': fan_out=() doesn't fit a leaf of shape (6, 4); name axes between -2 and 1,
or label the leaf 'auxiliary'""",
    )


def test_an_axis_named_twice_is_refused():
    assert_expected_inline(
        refusal(LeafError, Matrix(0, (1, -1)).view, "w", (6, 4)),
        """'w': fan_in=(1, -1) names an axis of shape (6, 4) twice""",
    )


def test_row_blocks_that_do_not_add_up_are_refused():
    assert_expected_inline(
        refusal(LeafError, Matrix(blocks=(16, 16, 15)).view, "attn.qkv", (48, 16)),
        """\
'attn.qkv': blocks=(16, 16, 15) sum to 47, fan_out is 48; give positive sizes
that sum to 48""",
    )


def test_column_blocks_that_do_not_add_up_are_refused():
    assert_expected_inline(
        refusal(LeafError, Matrix(blocks_in=(3, 3)).view, "attn.out", (6, 4)),
        """\
'attn.out': blocks_in=(3, 3) sum to 6, fan_in is 4; give positive sizes that sum
to 4""",
    )


def test_a_block_without_rows_is_refused():
    assert_expected_inline(
        refusal(LeafError, Matrix(blocks=(6, 0)).view, "w", (6, 4)),
        """'w': blocks=(6, 0) sum to 6, fan_out is 6; give positive sizes that sum to 6""",
    )


def test_lookup_returns_the_row():
    assert lookup({"plain": 1, "fancy": 2}, "fancy", "thing") == 2


def test_an_unknown_name_is_answered_with_the_known_ones_and_near_misses():
    assert_expected_inline(
        refusal(ConfigurationError, lookup, {"spectral": 1, "original": 2}, "spectrl", "scale"),
        """unknown scale 'spectrl'; known: 'spectral', 'original'; did you mean 'spectral'?""",
    )


def test_an_unknown_name_far_from_all_known_ones_gets_no_suggestion():
    assert_expected_inline(
        refusal(ConfigurationError, lookup, {"spectral": 1, "original": 2}, "x", "scale"),
        """unknown scale 'x'; known: 'spectral', 'original'""",
    )


@pytest.mark.parametrize("error", [ConfigurationError, LeafError, StateError])
def test_every_error_can_be_caught_as_one_of_fmuon_and_as_a_value_error(error):
    assert issubclass(error, FMuonError) and issubclass(error, ValueError)
