# SPDX-License-Identifier: Apache-2.0
"""Momentum in 8 bits and weights of 16 on sharded leaves, and in distributed checkpoints."""

import functools

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from layouts import assembled, inputs, located, option_mesh, options, put, where_of
from test_models import Net, local, names, sharded, train
from test_models import options as model_options
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fmuon
from fmuon.lowbit import decode
from fmuon.rounding import joined

KINDS = {
    "int8": {"momentum_dtype": "int8"},
    "fp8": {"momentum_dtype": "fp8"},
    "stochastic": {"rounding": "stochastic"},
    "mantissa": {"master": "mantissa"},
}
# Even sides, of 600 for several blocks, and rows of which some ranks have none.
SHAPES = {"a": (8, 600), "b": (600, 8), "c": (6, 8), "d": (2, 12), "stack": (4, 6, 8), "bias": (9,)}
LAYOUTS = [
    ("shard 0", 3), ("shard 1", 2), ("hsdp", 4), ("rows and columns", 4), ("column-wise", 4),
    ("ddp by mesh", 2), ("experts", 3),
]  # fmt: skip
# How far blocks of another axis, and the same blocks after other sums, may put a momentum.
LOWBIT = {"int8": (0.02, 1e-3), "fp8": (0.06, 1e-3)}
# Layouts in which no axis that blocks lie along is cut.
SAME_BLOCKS = ("shard 0", "hsdp", "column-wise", "ddp by mesh", "experts")


def start(kind):
    params, grads = inputs(SHAPES)
    if kind in ("stochastic", "mantissa"):
        params = {path: p.bfloat16() for path, p in params.items()}
    return params, grads


def five_steps(rank, world, layout, kind, compiled=False):
    """Parts of weights and momentum, and of float32 what mantissas make of the weights."""
    plain, given = start(kind)
    where = {path: where_of(layout, world, path, t.shape) for path, t in plain.items()}
    opt = fmuon.muon(**options(**KINDS[kind]), mesh=option_mesh(layout, world))
    params = {path: put(t, where[path]) for path, t in plain.items()}
    state = opt.init(params)
    own = {path: p.clone() for path, p in params.items()}
    own_state = opt.init(own)
    update = fmuon.compile(opt.update, backend="aot_eager") if compiled else opt.update
    for step, tensors in enumerate(given):
        grads = {path: put(t, where[path]) for path, t in tensors.items()}
        with torch.compiler.set_stance("fail_on_recompile" if compiled and step else "default"):
            updates, state = update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        fmuon.update_(opt, own, grads, own_state, step)
    for path, p in params.items():
        assert torch.equal(local(p), local(own[path])) or compiled, path
    return values(params, state, kind)


def values(params, state, kind):
    scales, mantissas = state.get("momentum_scale", {}), state.get("mantissa", {})
    found = {}
    for path, p in params.items():
        block, part = located(p)
        full = joined(part, local(mantissas[path])) if path in mantissas else part.float()
        if part.dtype != torch.float32:
            found["weight", path] = block, part.float()
        if kind != "stochastic":
            found["full", path] = block, full
        if path in state["momentum"]:
            momentum = local(state["momentum"][path])
            if scales:
                found["codes", path] = block, momentum.float()
                momentum = decode(kind, momentum, local(scales[path]))
            found["momentum", path] = block, momentum
    return found


@functools.cache
def one_process(kind):
    params, given = start(kind)
    opt = fmuon.muon(**options(**KINDS[kind]))
    state = opt.init(params)
    for step, grads in enumerate(given):
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
    return values(params, state, kind)


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_does_what_one_process_does(layout, world, kind):
    results = ranks.run(five_steps, world, layout, kind)
    first = start(kind)[0]
    for (what, path), (_, expected) in one_process(kind).items():
        whole = assembled(expected.shape, [result[what, path] for result in results])
        off = (whole - expected).norm()
        same = kind not in LOWBIT or layout in SAME_BLOCKS
        if what in ("weight", "codes"):
            # Sums in another order may put a value on the other side of a boundary.
            assert not same or (whole != expected).float().mean() <= 0.02, (what, path)
        elif what == "full":
            bound = 2e-6 if kind == "mantissa" else LOWBIT[kind][same]
            assert off <= bound * (expected - first[path].float()).norm(), (what, path)
        else:
            bound = 2e-6 if kind not in LOWBIT else LOWBIT[kind][same]
            assert off <= bound * expected.norm(), (what, path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_update_of_shards_is_one_graph_and_does_the_same(kind):
    compiled = ranks.run(five_steps, 2, "shard 0", kind, True, timeout=120.0)
    eager = ranks.run(five_steps, 2, "shard 0", kind)
    for one, other in zip(compiled, eager, strict=True):
        for key, (_, tensor) in one.items():
            off = (tensor - other[key][1]).norm()
            assert off <= 1e-3 * other[key][1].norm(), key


# ---- checkpoints ---------------------------------------------------------------------------------


def trainee(layout, world, kind):
    net, given, part, parts = sharded(layout, world)
    if kind in ("stochastic", "mantissa"):
        net.bfloat16()
    return net, fmuon.FMuon(net, **model_options(**given, **KINDS[kind])), part, parts


def state_of(net, optimizer):
    return {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}


def saved(rank, world, kind, folder):
    net, optimizer, part, parts = trainee("fsdp", world, kind)
    train(net, optimizer, part, parts, range(3))
    dcp.save(state_of(net, optimizer), checkpoint_id=folder)


def loaded(rank, world, layout, kind, folder):
    net, optimizer, part, parts = trainee(layout, world, kind)
    state = state_of(net, optimizer)
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    before = {}
    for name, p in names(net).items():
        for slot, tensor in optimizer.state[p].items():
            block, part_of = located(tensor.detach().clone())
            before[name, slot] = block, part_of.float(), tuple(tensor.shape)
    train(net, optimizer, part, parts, range(3, 4))
    after = {}
    for name, p in names(net).items():
        block, part_of = located(p.detach())
        after[name] = block, part_of.float()
    return before, after


@pytest.fixture(scope="module", params=["int8", "mantissa"])
def checkpoint(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp(request.param))
    ranks.run(saved, 2, request.param, folder)
    return request.param, folder


def resumed(layout, world, kind, folder):
    results = ranks.run(loaded, world, layout, kind, folder)
    before = {
        key: assembled(shape, [result[0][key][:2] for result in results])
        for key, (_, _, shape) in results[0][0].items()
    }
    sizes = {name: p.shape for name, p in Net().named_parameters()}
    after = {name: assembled(s, [r[1][name] for r in results]) for name, s in sizes.items()}
    return before, after


@pytest.mark.parametrize(
    ("layout", "world"), [("fsdp", 1), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tp", 4)]
)
def test_a_distributed_checkpoint_loads_at_any_world_size(checkpoint, layout, world):
    kind, folder = checkpoint
    if (kind, layout) == ("int8", "tp"):
        with pytest.raises(ranks.RankError, match="momentum_buffer_scale"):
            ranks.run_fresh(loaded, world, layout, kind, folder)
        return
    before, after = resumed(layout, world, kind, folder)
    expected, following = resumed("fsdp", 2, kind, folder)
    extra = {"int8": "momentum_buffer_scale", "mantissa": "mantissa"}[kind]
    assert any(slot == extra for _, slot in before)
    assert before.keys() == expected.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, expected[key]), key
    for name, tensor in after.items():
        # Gradients of bfloat16 weights depend on how a batch is cut.
        bound = 5e-2 if kind == "mantissa" else 2e-6
        assert (tensor - following[name]).norm() <= bound * following[name].norm(), name
