# SPDX-License-Identifier: Apache-2.0
import functools

import pytest
import torch
from torch.testing import assert_close

import fmuon


def tree():
    return {"a": torch.randn(3, 4), "b": [torch.randn(5), None]}


def test_equals_the_clipping_of_torch():
    grads = tree()
    leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in (grads["a"], grads["b"][0])]
    for leaf, grad in zip(leaves, (grads["a"], grads["b"][0]), strict=True):
        leaf.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
    clipped, own = fmuon.clip_by_global_norm(grads, 0.5)
    assert_close(own, norm)
    assert_close(fmuon.global_norm(grads), norm)
    # torch divides by norm + 1e-6.
    assert_close([clipped["a"], clipped["b"][0]], [leaf.grad for leaf in leaves], rtol=1e-5, atol=0)
    assert clipped["b"][1] is None
    assert_close(fmuon.global_norm(clipped), torch.tensor(0.5))


def test_smaller_gradients_come_back_with_the_same_bits():
    grads = tree()
    clipped, _ = fmuon.clip_by_global_norm(grads, torch.tensor(100.0))
    assert torch.equal(clipped["a"], grads["a"])


def test_sixteen_bit_leaves_are_summed_in_float32():
    leaf = torch.full((300,), 300.0, dtype=torch.float16)
    assert_close(fmuon.global_norm([leaf]), torch.tensor(300.0 * 300**0.5))
    clipped, _ = fmuon.clip_by_global_norm([leaf], 1.0)
    assert clipped[0].dtype == torch.float16


def test_traces_into_one_graph():
    compiled = torch.compile(fmuon.clip_by_global_norm, fullgraph=True, backend="eager")
    grads = {"a": torch.randn(3), "b": torch.randn(2)}
    assert_close(compiled(grads, torch.tensor(0.1)), fmuon.clip_by_global_norm(grads, 0.1))


def test_errors():
    with pytest.raises(fmuon.ConfigurationError, match="max_norm=0: must be positive"):
        fmuon.clip_by_global_norm(tree(), 0)
    with pytest.raises(fmuon.LeafError, match="no leaf is a tensor"):
        fmuon.global_norm({"a": None})


@pytest.mark.parametrize("name", ["clip", "max_norm", "clip_norm", "max_grad_norm", "grad_clip"])
def test_an_option_that_would_clip_updates_is_refused_with_the_reason(name):
    for make in (fmuon.muon, functools.partial(fmuon.FMuon, torch.nn.Linear(3, 2))):
        with pytest.raises(fmuon.ConfigurationError, match=f"^{name} is no option.*clip_by_global"):
            make(**{name: 1.0})
        with pytest.raises(TypeError, match="unexpected keyword argument 'clips'"):
            make(clips=1.0)
