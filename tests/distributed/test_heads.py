# SPDX-License-Identifier: Apache-2.0
"""Heads that are cut among ranks, evenly or not, are clipped as if they were whole."""

import pytest
import ranks
import torch
from layouts import GRIDS, S0, S1, assembled, inputs, located, mesh_of, put, where_of
from torch.distributed.tensor import DTensor

import fmuon
from fmuon import Attention, Heads

# Heads of 3 rows in 12, 24 and 6: cut through the middle by 2, 3 and 4 ranks, the keys of a layer
# also into ranks with none.
SHAPES = {
    "q": (12, 5),
    "k": (6, 5),
    "bias": (12,),
    "kernel": (5, 24),
    "tall": (6, 3, 2),
    "other": (7, 5),
}
LAYERS = {
    "grouped": Attention(4, query=("q", "bias"), key="k", key_heads=2, shared_keys="smallest"),
    "fused": Attention(
        4,
        query=Heads("kernel", 3, stride=6, axis=1),
        key=(Heads("kernel", 3, start=3, stride=6, axis=1), Heads("tall", 1, start=1, axis=0)),
    ),
}
LOGITS = {
    "grouped": torch.tensor([8.0, 2.0, 5.0, 3.0]),
    "fused": torch.tensor([3.0, 9.0, 1.0, 50.0]),
}
CASES = [(name, world) for name, (shapes, _) in GRIDS.items() for world in shapes]


def clip(params):
    return fmuon.qk_clip(params, LOGITS, 2.0, layers=LAYERS)


def clipped(rank, world, layout, backend=None):
    plain, _ = inputs(SHAPES)
    where = {path: where_of(layout, world, path, t.shape) for path, t in plain.items()}
    params = {path: put(t, where[path]) for path, t in plain.items()}
    call = clip
    if backend:
        # Makes the meshes known, as init does.
        fmuon.distributed.prepare(fmuon.muon(labels={"re:.*": "auxiliary"}), params)
        call = fmuon.compile(clip, backend=backend)
    new = call(params)
    for path, old in params.items():
        assert isinstance(new[path], DTensor)
        assert new[path].placements == old.placements and new[path].shape == old.shape
        assert torch.equal(old.to_local(), put(plain[path], where[path]).to_local())
    return {path: located(t) for path, t in new.items()}


def check(results):
    for path, whole in clip(inputs(SHAPES)[0]).items():
        assert torch.equal(assembled(whole.shape, [parts[path] for parts in results]), whole), path


@pytest.mark.parametrize(("layout", "world"), CASES)
def test_every_layout_is_clipped_as_the_whole(layout, world):
    check(ranks.run(clipped, world, layout))


@pytest.mark.parametrize("layout", ["shard 0", "shard 1", "column-wise"])
def test_a_compiled_clip_of_shards_is_the_same(layout):
    check(ranks.run(clipped, 2, layout, "aot_eager"))


def after_a_step(rank, world):
    """A step and a clip in one graph, on a sharded and on a plain leaf of one layer."""
    plain, (grads, *_) = inputs({"q": (12, 5), "k": (12, 5)}, steps=1)
    mesh = mesh_of((world,))
    where = {"q": (mesh, [S0]), "k": (mesh, [S1])}
    params, grads = ({p: put(t, where[p]) for p, t in tree.items()} for tree in (plain, grads))
    opt = fmuon.muon(0.1, orthogonalize=fmuon.NewtonSchulz(dtype="float32"))
    layers, logits = {"a": Attention(4, query="q", key="k")}, {"a": LOGITS["grouped"]}

    def step_of(params, grads, state, step):
        updates, state = opt.update(grads, state, step, params)
        return fmuon.qk_clip(fmuon.apply_updates(params, updates), logits, 2.0, layers=layers)

    state = opt.init(params)
    compiled = fmuon.compile(step_of, backend="aot_eager")(params, grads, state, 0)
    eager = step_of(params, grads, state, 0)
    for path, leaf in eager.items():
        torch.testing.assert_close(compiled[path].to_local(), leaf.to_local())


def test_a_step_of_shards_and_a_clip_are_one_graph():
    ranks.run(after_a_step, 2)


def sharded_logits(rank, world):
    mesh = mesh_of((world,))
    params = {"q": torch.randn(8, 2), "k": torch.randn(8, 2)}
    logits = {"a": put(torch.ones(4), (mesh, [S0]))}
    with pytest.raises(fmuon.LeafError, match="is a DTensor; give a plain tensor"):
        fmuon.qk_clip(params, logits, layers={"a": Attention(4, query="q", key="k")})


def test_logits_that_are_sharded_are_refused():
    ranks.run(sharded_logits, 2)
