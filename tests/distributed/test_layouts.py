# SPDX-License-Identifier: Apache-2.0
"""Every layout beside one process: the same result, the same work in all, the planned messages."""

import functools
import re

import pytest
import ranks
import torch
from layouts import (
    GRIDS,
    Calls,
    assembled,
    inputs,
    located,
    option_mesh,
    options,
    put,
    shapes_of,
    where_of,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fmuon
from fmuon.call import Call
from fmuon.functional import configuration_of

TOLERANCE = 2e-6
CASES = [
    *((name, world) for name, (shapes, _) in GRIDS.items() for world in shapes),
    *((name, world) for name in ("ddp by group", "ddp by mesh", "experts") for world in (2, 3, 4)),
    *((name, 4) for name in ("ddp by grid", "experts, copied", "mixed", "ranks out of order")),
    ("parts of a mesh", 2),
    ("parts of a mesh", 4),
]


def planned(config, grads, state, params, in_place):
    """The collectives of a step by what its plan says."""
    call = Call(config, grads, state, 0, params, betas=None, present=None, found_inf=None)
    plan = call._plan(in_place)
    counts = {"all_reduce": len(plan.shared)}

    def add(name, times):
        counts[name] = counts.get(name, 0) + times

    for bucket in plan.groups:
        exchange = getattr(bucket, "exchange", None)
        if exchange is None:
            continue
        if len(exchange.domain.parts) > 1:
            add("all_to_all_single", 2)
        if len(exchange.domain.copies) > 1:
            sizes = {
                sum(torch.Size(exchange.shapes[i]).numel() for i in group)
                for group in exchange.copied
            }
            add("all_gather_into_tensor" if len(sizes) == 1 else "all_to_all_single", 1)
    counts["wait_tensor"] = sum(counts.values())
    return {name: count for name, count in counts.items() if count}


def five_steps(rank, world, layout, in_place, changed, compiled=False):
    """Parts of the params and of the momentum, flops and collectives of one step on this rank."""
    plain, given = inputs(shapes_of(layout))
    where = {path: where_of(layout, world, path, t.shape) for path, t in plain.items()}
    opt = fmuon.muon(**options(**changed), mesh=option_mesh(layout, world))
    params = {path: put(t, where[path]) for path, t in plain.items()}
    state = opt.init(params)
    update = fmuon.compile(opt.update, backend=compiled) if compiled else opt.update
    for step, tensors in enumerate(given):
        grads = {path: put(t, where[path]) for path, t in tensors.items()}
        calls, flops = Calls(), FlopCounterMode(display=False)
        config = configuration_of(opt)
        expected = planned(config, grads, state, params, in_place)
        if compiled:
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                updates, state = update(grads, state, step, params)
            params = fmuon.apply_updates(params, updates)
            continue
        with calls, flops:
            if in_place:
                fmuon.update_(opt, params, grads, state, step)
            else:
                updates, state = update(grads, state, step, params)
                params = fmuon.apply_updates(params, updates)
    return {
        "params": {path: located(t) for path, t in params.items()},
        "momentum": {path: located(t) for path, t in state["momentum"].items()},
        "second_moment": {path: located(t) for path, t in state.get("second_moment", {}).items()},
        "flops": flops.get_total_flops(),
        "calls": calls.counts,
        "planned": expected,
    }


@functools.cache
def one_process(kind, **changed):
    start, given = inputs(shapes_of(kind))
    opt = fmuon.muon(**options(**changed))
    params, state = start, opt.init(start)
    for step, grads in enumerate(given):
        with FlopCounterMode(display=False) as flops:
            updates, state = opt.update(grads, state, step, params)
            params = fmuon.apply_updates(params, updates)
    moments = {name: state.get(name, {}) for name in ("momentum", "second_moment")}
    return start, params, moments, flops.get_total_flops()


def check(results, layout, **changed):
    start, params, moments, _ = one_process(layout, **changed)
    for path, expected in params.items():
        whole = assembled(expected.shape, [result["params"][path] for result in results])
        moved = (expected - start[path]).norm()
        assert (whole - expected).norm() <= TOLERANCE * moved, path
    for name, leaves in moments.items():
        for path, expected in leaves.items():
            whole = assembled(expected.shape, [result[name][path] for result in results])
            assert (whole - expected).norm() <= TOLERANCE * expected.norm(), (name, path)


@pytest.mark.parametrize(("layout", "world"), CASES)
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_every_layout_does_what_one_process_does(layout, world, in_place):
    results = ranks.run(five_steps, world, layout, in_place, {})
    check(results, layout)
    for result in results:
        assert result["calls"] == result["planned"]
    if layout != "mixed":
        # In a mixed tree the plain leaves are everyone's own.
        assert sum(result["flops"] for result in results) == one_process(layout)[-1]


def matrices_only(path, leaf):
    return "muon" if leaf.ndim == 2 else "auxiliary"


VARIANTS = {
    "normuon": {"second_moment": "normuon"},
    "normuon, long": {"second_moment": fmuon.NorMuon(axis="long")},
    "adamuon": {"second_moment": "adamuon"},
    "adaptive": {"adaptive": True, "labels": matrices_only},
    "balanced": {"equilibrate": "rows", "renormalize": "columns_rows", "decay": "cautious_squared"},
}


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ("shard 0", 3), ("shard 1", 2), ("hsdp", 4), ("rows and columns", 4), ("column-wise", 4),
        ("replicas", 2), ("ddp by mesh", 3), ("experts", 3), ("experts, copied", 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_do_what_one_process_does(variant, layout, world):
    changed = VARIANTS[variant]
    if (variant, layout) == ("normuon, long", "column-wise"):
        # Three rows on four ranks.
        with pytest.raises(ranks.RankError, match=r"'d'.* sharded along an axis that is shorter"):
            ranks.run_fresh(five_steps, world, layout, False, changed)
        return
    for in_place in (False, True):
        check(ranks.run(five_steps, world, layout, in_place, changed), layout, **changed)


def test_compiled_variants_of_shards_do_the_same():
    changed = {"second_moment": "adamuon", "equilibrate": "rows"}
    results = ranks.run(five_steps, 2, "shard 0", False, changed, "aot_eager", timeout=120.0)
    check(results, "shard 0", **changed)


def test_a_second_moment_needs_a_part_of_what_it_averages_on_every_rank():
    changed = VARIANTS["normuon"]
    with pytest.raises(ranks.RankError, match="is sharded along an axis that is shorter than"):
        ranks.run_fresh(five_steps, 4, "shard 1", False, changed)


@pytest.mark.parametrize("layout", ["shard 0", "hsdp", "column-wise", "ddp by group", "mixed"])
def test_many_small_buckets_in_flight_do_the_same(layout):
    changed = {"max_stack_bytes": 1}
    results = ranks.run(five_steps, 4, layout, False, changed)
    check(results, layout, **changed)
    assert results[0]["calls"] == results[0]["planned"]
    assert sum(results[0]["calls"].values()) > 12


def test_experts_sharded_on_the_stack_axis_need_no_exchange():
    for result in ranks.run(five_steps, 2, "experts", False, {"missing": "zero"}):
        assert result["calls"] == {}


def test_nobody_has_more_than_his_share_of_the_work():
    results = ranks.run(five_steps, 2, "ddp by group", False, {})
    flops = [result["flops"] for result in results]
    assert max(flops) <= 4 / 3 * sum(flops) / 2


QUICK = {("shard 0", 2), ("ddp by group", 2)}
COMPILED = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in CASES
    if case[1] != 3
]


@pytest.mark.parametrize(("layout", "world"), COMPILED)
def test_a_compiled_update_is_one_graph_with_the_same_result(layout, world):
    check(ranks.run(five_steps, world, layout, False, {}, "aot_eager", timeout=100), layout)


# ---- the order of messages and arithmetic --------------------------------------------------------


def three_buckets(layout, world):
    """An update of three leaves that share no stack, and what it is called with."""
    shapes = {"a": (16, 8), "b": (12, 8), "c": (10, 6)}
    plain, (given,) = inputs(shapes, 1)
    where = {path: where_of(layout, world, path, shape) for path, shape in shapes.items()}
    opt = fmuon.muon(0.1, missing="zero", orthogonalize=fmuon.NewtonSchulz(steps=1))
    params = {path: put(t, where[path]) for path, t in plain.items()}
    grads = {path: put(t, where[path]) for path, t in given.items()}
    return opt, (grads, opt.init(params), 0, params)


class Order(TorchDispatchMode):
    """Notes messages, waits and products as they come."""

    def __init__(self):
        super().__init__()
        self.order = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        name = function.name().split("::")[1]
        letter = {"all_to_all_single": "a", "all_gather_into_tensor": "g", "wait_tensor": "w"}
        if name in letter or "mm" in name:
            self.order.append(letter.get(name, "m"))
        return function(*args, **(kwargs or {}))


def eager_order(rank, world, layout):
    opt, arguments = three_buckets(layout, world)
    with Order() as noted:
        opt.update(*arguments)
    return "".join(noted.order)


def test_the_next_bucket_is_sent_before_this_one_is_waited_for():
    orders = ranks.run(eager_order, 2, "shard 0")
    assert {order.replace("m", "") for order in orders} == {"aawaawawwaww"}
    assert "aawaawmmmawwmmmaww" in orders


def test_replicas_are_sent_their_copies_while_the_next_bucket_is_on_its_way():
    orders = ranks.run(eager_order, 4, "hsdp")
    # Send 1, 2, wait 1, return 1; send 3, wait 2, return 2, wait 1, copy 1; wait 3, return 3, and
    # only then wait for the copies of 1, wait 2, copy 2, and so on. Unequal copies are an all-to-all.
    turns = ("aawa", "awawa", "wawwa", "wwa", "w")
    assert {order.replace("m", "") for order in orders} == {"".join(turns)}


def generated(rank, world):
    """The collectives and products of the code that inductor makes of an update, in order."""
    from torch._inductor.utils import run_and_get_code

    opt, arguments = three_buckets("shard 0", world)
    expected, _ = opt.update(*arguments)
    update = fmuon.compile(opt.update, "default")
    (updates, _), (code,) = run_and_get_code(update, *arguments)
    for path in updates:
        torch.testing.assert_close(updates[path].to_local(), expected[path].to_local())
    call = r"^ +(?:\w+ = )?(?:torch\.ops\.)?_c10d_functional\.(all_to_all|wait)_\w+\.default\("
    products = r"^ +extern_kernels\.\w*(mm)\("
    found = re.findall(f"{call}|{products}", code, re.MULTILINE)
    return ["".join(names) for names in found]


@pytest.mark.slow
def test_in_generated_code_the_next_bucket_is_sent_before_this_one_is_waited_for():
    for order in ranks.run(generated, 2, timeout=200):
        # Of three buckets: send 1, send 2, wait 1, return 1, send 3, wait 2, return 2, and so on.
        messages = [name for name in order if name != "mm"]
        assert "".join(name[0] for name in messages) == "aawaawawwaww"
    # The rank that computes the second and the third does it while messages are on their way.
    assert "".join(name[0] for name in order) == "aawaawmmmawwmmmaww"
