# SPDX-License-Identifier: Apache-2.0
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from strategies import refusal
from torch.utils._pytree import tree_structure

from fmuon import LeafError
from fmuon.tree import flatten


class Layer(NamedTuple):
    weight: Any
    bias: Any


leaves = st.none() | st.builds(torch.zeros, st.just(2))
keys = st.text("abcxyz_", min_size=1, max_size=3)
trees = st.recursive(
    leaves,
    lambda children: (
        st.dictionaries(keys, children, max_size=3)
        | st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.builds(Layer, children, children)
    ),
    max_leaves=8,
)


def walk(tree, prefix=()):
    """Paths and leaves in the order of the tree."""
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, Layer):
        children = tree._asdict().items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        return [(".".join(map(str, prefix)), tree)]
    return [found for key, child in children for found in walk(child, (*prefix, key))]


def identical(entries, others):
    """Same paths in the same order, and the very same objects at them."""
    return len(entries) == len(others) and all(
        path == other_path and leaf is other
        for (path, leaf), (other_path, other) in zip(entries, others, strict=True)
    )


@given(trees)
def test_leaves_come_in_order_under_their_dotted_paths(tree):
    found, _ = flatten(tree)
    assert identical(list(found.items()), walk(tree))


@given(trees)
def test_rebuilding_gives_back_the_tree(tree):
    found, structure = flatten(tree)
    rebuilt = structure.rebuild(found)
    assert tree_structure(rebuilt) == tree_structure(tree)
    assert identical(walk(rebuilt), walk(tree))


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=4), leaves))
def test_a_flat_dict_is_treated_as_any_other_tree(flat):
    fast, fast_structure = flatten(flat)
    general, general_structure = flatten(OrderedDict(flat))
    assert identical(list(fast.items()), list(general.items()))
    assert fast_structure.paths == general_structure.paths
    assert identical(
        list(fast_structure.rebuild(fast).items()),
        list(general_structure.rebuild(general).items()),
    )


def test_a_path_left_out_is_rebuilt_as_none():
    tree = {"a": [torch.zeros(1), torch.ones(1)]}
    found, structure = flatten(tree)
    assert structure.rebuild({"a.1": found["a.1"]}) == {"a": [None, found["a.1"]]}


def test_a_flat_dict_keeps_the_order_of_its_keys_when_rebuilt():
    found, structure = flatten({"z": None, "a": torch.zeros(1)})
    assert list(structure.rebuild(dict(reversed(found.items())))) == ["z", "a"]


def test_empty_containers_survive():
    tree = {"a": {}, "b": [], "c": torch.zeros(1)}
    found, structure = flatten(tree)
    assert list(found) == ["c"]
    assert structure.rebuild(found) == tree


def test_the_dict_of_leaves_is_not_the_callers():
    tree = {"w": torch.zeros(1)}
    flatten(tree)[0]["other"] = None
    assert list(tree) == ["w"]


def test_a_bare_tensor_is_a_tree_with_an_empty_path():
    tensor = torch.zeros(2)
    found, structure = flatten(tensor)
    assert list(found) == [""]
    assert structure.rebuild(found) is tensor


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)},
        {"a": [torch.zeros(1)], "a.0": None},
    ],
)
def test_a_nested_and_a_dotted_name_for_one_path_are_refused(tree):
    with pytest.raises(LeafError, match="two leaves have the path"):
        flatten(tree)


def test_a_number_and_a_string_for_one_path_are_refused():
    tree = {0: torch.zeros(1), "0": torch.zeros(1)}
    assert_expected_inline(
        refusal(LeafError, flatten, tree, "grads"),
        """grads: two leaves have the path '0'; rename one of them""",
    )


@pytest.mark.parametrize("leaf", [1.5, "weights", object(), torch.zeros])
def test_a_leaf_that_is_no_tensor_is_refused(leaf):
    with pytest.raises(LeafError, match=r"params: leaf 'a\.0' is a "):
        flatten({"a": [leaf]})


def test_the_refusal_of_a_leaf_says_what_a_leaf_is():
    assert_expected_inline(
        refusal(LeafError, flatten, {"w": torch.zeros(1), "scale": 1.5}),
        """\
params: leaf 'scale' is a float; a leaf is a tensor, or None for one that
doesn't move""",
    )
