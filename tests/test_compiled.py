# SPDX-License-Identifier: Apache-2.0
"""Graphs are counted with backends that compile nothing; inductor runs where its code matters."""

import contextlib
import functools
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import fmuon


class Result(NamedTuple):
    value: torch.Tensor


EXACT = fmuon.NewtonSchulz(dtype="float32")


def counting(backend="eager"):
    return CompileCounterWithBackend(backend)


def params_of(count=3, shape=(6, 4)):
    params = {f"w{i}": torch.randn(shape) for i in range(count)}
    return {**params, "t": torch.randn(4, 6), "b": torch.randn(4), "embed": torch.randn(9, 3)}


def like(params):
    return {k: torch.randn_like(p) for k, p in params.items()}


@contextlib.contextmanager
def no_recompiles():
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


def test_one_graph_over_20_steps_in_which_everything_changes():
    counter = counting("aot_eager")
    opt = fmuon.muon(orthogonalize=EXACT, weight_decay=0.1)
    weight = torch.randn(4, 9)

    def loss(params, x):
        hidden = x @ params["w0"].T @ params["w1"] + params["b"]
        return (hidden @ weight @ params["embed"]).square().mean()

    def train_step(params, state, step, x, lr, weight_decay, momentum):
        grads = torch.func.grad(loss)(params, x)
        updates, state = opt.update(
            grads, state, step, params, lr=lr, weight_decay=weight_decay, momentum=momentum
        )
        return fmuon.apply_updates(params, updates), state

    compiled = torch.compile(train_step, fullgraph=True, dynamic=False, backend=counter)
    params = eager_params = params_of(2)
    state = eager_state = opt.init(params)
    for i in range(20):
        step, x = torch.tensor(i), torch.randn(5, 4)
        scalars = [torch.tensor(v) for v in (0.1 / (i + 1), 0.1 * i, 0.8 + 0.005 * i)]
        with no_recompiles() if i else contextlib.nullcontext():
            params, state = compiled(params, state, step, x, *scalars)
        eager_params, eager_state = train_step(eager_params, eager_state, step, x, *scalars)
        # Compared step by step: twenty steps of descent amplify the rounding of one.
        assert_close((params, state), (eager_params, eager_state), rtol=1e-4, atol=1e-5)
        params, state = eager_params, eager_state
    assert counter.frame_count == 1


def test_numbers_do_not_recompile_through_fmuon_compile():
    counter = counting()
    opt = fmuon.muon(weight_decay=0.1)
    update = fmuon.compile(opt.update, backend=counter)
    params = params_of()
    state = opt.init(params)
    for i in range(12):
        _, state = update(
            params, state, i, params, lr=0.1 / (i + 1), weight_decay=0.01 * (i + 1),
            momentum=0.9 + 0.001 * i, betas=(0.9, 0.99 + 0.0001 * i), eps=1e-8 * (i + 1),
        )  # fmt: skip
    assert counter.frame_count == 1


def test_per_leaf_scalars_and_present_flags_do_not_recompile():
    counter = counting()
    opt = fmuon.muon()
    update = fmuon.compile(opt.update, backend=counter)
    params = params_of()
    state = opt.init(params)
    for i in range(6):
        present = {"w1": torch.tensor(i % 2 == 0), "b": torch.tensor(i % 3 == 0)}
        _, state = update(params, state, i, lr={"w0": 0.1 * i, "b": 0.01 * i}, present=present)
    assert counter.frame_count == 1
    assert state["missed"]["w1"] == 3 and state["missed"]["b"] == 4


def test_schedules_are_part_of_the_graph():
    counter = counting()
    opt = fmuon.muon(lambda step: 0.1 / (1 + step), weight_decay=lambda step: 0.01 * step)
    update = fmuon.compile(opt.update, backend=counter)
    params = params_of()
    state = opt.init(params)
    for i in range(3):
        expected = opt.update(params, state, i, params)
        result = update(params, state, i, params)
        assert_close(result, expected)
        state = result[1]
    assert counter.frame_count == 1


def test_weight_decay_masks_and_label_callables_trace():
    opt = fmuon.muon(
        weight_decay=lambda path, tensor: 0.1 * (tensor.ndim > 1),
        labels=lambda path, tensor: "auxiliary" if path == "w0" else None,
    )
    params = params_of()
    state = opt.init(params)
    update = fmuon.compile(opt.update, backend="eager")
    assert_close(update(params, state, 0, params), opt.update(params, state, 0, params))


def test_twelve_optimizers_in_one_process():
    params = params_of()
    for i in range(12):
        opt = fmuon.muon(0.01 * i, momentum=0.5 + 0.04 * i)
        counter = counting()
        update = fmuon.compile(opt.update, backend=counter)
        assert_close(update(params, opt.init(params), 0), opt.update(params, opt.init(params), 0))
        assert counter.frame_count == 1


def test_twenty_distinct_shapes_are_one_graph():
    params = {f"w{i}": torch.randn(3 + i, 5 + 2 * i) for i in range(20)}
    counter = counting()
    update = fmuon.compile(fmuon.muon().update, backend=counter)
    _, state = update(params, fmuon.init(params), 0)
    update(params, state, 1)
    assert counter.frame_count == 1


def graph_operations(count):
    """How often each operation occurs in the graph of `count` matrices of one shape."""
    seen = Counter()

    def backend(graph, inputs):
        seen.update(
            node.target.__name__ if callable(node.target) else node.target
            for node in graph.graph.nodes
            if node.op in ("call_function", "call_method")
        )
        return graph.forward

    params = {f"w{i}": torch.randn(8, 4) for i in range(count)}
    torch.compile(fmuon.update, fullgraph=True, backend=backend)(params, fmuon.init(params), 0)
    return seen


def test_a_hundred_matrices_need_no_more_products_than_ten():
    ten, hundred = graph_operations(10), graph_operations(100)
    products = [name for name in hundred if "mm" in name or "matmul" in name]
    assert sum(hundred[name] for name in products) == 15
    assert {name: ten[name] for name in products} == {name: hundred[name] for name in products}


def restarts(function, *args, **kwargs):
    """How often dynamo traces the first call again, in a process as good as fresh."""
    torch._dynamo.reset()
    torch._dynamo.symbolic_convert.TensorifyState.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    # What makes it start again is found behind the trace.
    fmuon.compile(function, backend="aot_eager")(*args, **kwargs)
    metrics = torch._dynamo.utils.get_compilation_metrics()
    assert metrics
    return [reason for entry in metrics for reason in entry.restart_reasons or ()]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64), {"w0": 0.1}])
def test_no_scalar_makes_dynamo_trace_twice(rate):
    params = params_of()
    opt = fmuon.muon(weight_decay=0.1)
    scalars = {"lr": rate, "weight_decay": 0.2, "momentum": 0.9, "betas": (0.8, 0.9), "eps": 1e-7}
    assert not restarts(opt.update, params, opt.init(params), 0, params, **scalars)

    def step(grads, state, count, params, lr):
        fmuon.update_(opt, params, grads, state, count, lr=lr)

    assert not restarts(step, params, opt.init(params), 0, params, rate)


def test_a_vector_is_no_scalar_in_a_graph_either():
    params = params_of()
    update = fmuon.compile(fmuon.muon().update, backend="eager")
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(fmuon.ConfigurationError, match=r"^lr: a tensor of shape \(1,\)"):
            update(params, fmuon.init(params), 0, params, lr=torch.ones(1, dtype=dtype))


def test_numbers_do_not_recompile_through_the_module_functions():
    params = params_of()
    counter = counting()
    update = fmuon.compile(fmuon.update, backend=counter)
    state = fmuon.init(params)
    for i in range(10):
        _, state = update(params, state, i, lr=0.1 / (i + 1))
    assert counter.frame_count == 1


def test_a_float_lr_costs_two_graphs_where_fmuon_compile_is_not_used():
    params = params_of()
    counter = counting()
    update = torch.compile(fmuon.update, fullgraph=True, backend=counter)
    state = fmuon.init(params)
    for i in range(11):
        _, state = update(params, state, torch.tensor(i), lr=0.1 / (i + 1))
    assert counter.frame_count <= 3


def test_partials_have_caches_of_their_own():
    params = params_of()
    for i in range(12):
        opt = fmuon.muon(0.01 * i)
        update = fmuon.compile(functools.partial(opt.update, lr=0.1 * i), backend="eager")
        update(params, opt.init(params), 0)


def test_any_pytree_comes_out_of_a_mode_with_cuda_graphs():
    step = fmuon.compile(lambda x: (Result(x + 1), [x]), mode="reduce-overhead")
    result, _ = step(torch.ones(2))
    assert torch.equal(result.value, torch.full((2,), 2.0))


def test_errors_of_the_plan_arrive_as_they_are():
    params = params_of()
    update = fmuon.compile(fmuon.muon(weight_decay=0.1).update, backend="eager")
    with pytest.raises(fmuon.ConfigurationError, match="weight decay needs the params"):
        update(params, fmuon.init(params), 0)


def test_shapes_that_dynamo_holds_to_be_symbolic_are_fixed():
    update = torch.compile(fmuon.update, fullgraph=True, dynamic=True, backend="eager")
    for rows in (4, 5, 6):
        params = {"w": torch.randn(rows, 7)}
        assert_close(
            update(params, fmuon.init(params), 0), fmuon.update(params, fmuon.init(params), 0)
        )


def test_vmap_inside_a_graph():
    opt = fmuon.muon(orthogonalize=EXACT)
    grads = {"w": torch.randn(3, 6, 4), "b": torch.randn(3, 4)}
    state = opt.init({"w": torch.randn(6, 4), "b": torch.randn(4)})

    def batched(grads, state):
        return torch.func.vmap(lambda g: opt.update(g, state, 0))(grads)

    compiled = torch.compile(batched, fullgraph=True, backend="eager")
    assert_close(compiled(grads, state), batched(grads, state))


def test_the_environment_can_switch_compilation_off(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    opt = fmuon.muon()
    assert fmuon.compile(opt.update) == opt.update


def test_compile_leaves_the_settings_of_dynamo_alone():
    before = dict(torch._dynamo.config.get_config_copy())
    params = params_of()
    fmuon.compile(fmuon.muon().update, backend="eager")(params, fmuon.init(params), 0)
    assert dict(torch._dynamo.config.get_config_copy()) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_equals_eager(dtype):
    opt = fmuon.muon(0.1, orthogonalize=EXACT, weight_decay=0.1)
    params = {k: p.to(dtype) for k, p in params_of().items()}
    grads, state = like(params), opt.init(params)
    _, state = opt.update(grads, state, 0, params)
    before = torch.utils._pytree.tree_map(torch.clone, (params, grads, state))
    update = fmuon.compile(opt.update, mode="default")
    result = update(grads, state, 1, params)
    assert_close(result, opt.update(grads, state, 1, params), rtol=1e-5, atol=1e-6)
    assert_close((params, grads, state), before, rtol=0, atol=0)


@pytest.mark.slow
def test_three_hundred_small_leaves_compile_with_inductor():
    params = {f"w{i}": torch.randn(4, 4) for i in range(100)}
    params |= {f"b{i}": torch.randn(4) for i in range(200)}
    opt = fmuon.muon(orthogonalize=EXACT)
    state = opt.init(params)
    result = fmuon.compile(opt.update, mode="default")(params, state, 0)
    assert_close(result, opt.update(params, state, 0), rtol=1e-5, atol=1e-6)
