# SPDX-License-Identifier: Apache-2.0
"""Steps whose gradients are not finite: in the core, inside a graph, and in FMuon."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import fmuon
from fmuon.clipping import all_finite

BAD = [float("inf"), float("-inf"), float("nan")]


def leaves():
    shapes = {"w": (4, 6), "tall": (6, 4), "bias": (6,), "stack": (2, 3, 5), "unused": (4, 6)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def make(**options):
    return fmuon.muon(0.1, weight_decay=0.1, labels={"stack": fmuon.Matrix(1, 2)}, **options)


def bits(tree):
    """Bit patterns, so that -0.0 is not 0.0."""
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tree.view(integers[tree.element_size()]) if tree.is_floating_point() else tree


def assert_same_bits(a, b):
    assert_close(bits(a), bits(b), rtol=0, atol=0)


def counts(missed, steps):
    return {path: steps - int(count) for path, count in missed.items()}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("path", ["w", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_that_is_not_finite_leaves_every_bit_as_it_was(bad, path, dtype):
    opt = make(nonfinite="skip", second_moment="normuon", momentum_dtype=dtype)
    params = {name: leaf.to(dtype) for name, leaf in leaves().items()}
    params["w"][0, 0], params["bias"][0] = -0.0, -0.0
    _, state = opt.update(leaves(), opt.init(params), 0, params)
    grads = leaves()
    grads[path].flatten()[1] = bad
    updates, new = opt.update(grads, state, 1, params)
    assert all((update == 0).all() for update in updates.values())
    assert_same_bits(fmuon.apply_updates(params, updates), params)
    for name in ("momentum", "second_moment", "auxiliary"):
        assert_same_bits(new[name], state[name])
    assert counts(new["missed"], 2) == counts(state["missed"], 1)
    in_place, held = copy.deepcopy((params, state))
    fmuon.update_(opt, in_place, grads, held, 1)
    assert_same_bits((in_place | held), (params | new))


def test_after_a_skipped_step_the_run_goes_on_as_if_it_had_not_been():
    opt = make(nonfinite="skip")
    params, straight = leaves(), None
    straight = copy.deepcopy(params)
    state, expected = opt.init(params), opt.init(straight)
    good = [leaves() for _ in range(3)]
    bad = leaves() | {"w": torch.full((4, 6), float("nan"))}
    for step, grads in enumerate([good[0], bad, good[1], bad, good[2]]):
        fmuon.update_(opt, params, grads, state, step)
    for step, grads in enumerate(good):
        fmuon.update_(opt, straight, grads, expected, step)
    assert_same_bits(params, straight)


def test_finite_steps_have_the_bits_of_the_default():
    params, grads = leaves(), leaves()
    skipping, plain = make(nonfinite="skip"), make()
    assert_same_bits(
        skipping.update(grads, skipping.init(params), 0, params)[0],
        plain.update(grads, plain.init(params), 0, params)[0],
    )


def test_propagating_is_the_default():
    opt, params, grads = make(), leaves(), leaves()
    grads["bias"][0] = float("inf")
    updates, _ = opt.update(grads, opt.init(params), 0, params)
    assert not updates["bias"].isfinite().all() and updates["w"].isfinite().all()


@pytest.mark.parametrize("found", [torch.tensor(1.0), torch.tensor(True)])
def test_found_inf_skips_a_step_whatever_the_gradients_are(found):
    opt, params, grads = make(), leaves(), leaves()
    state = opt.init(params)
    updates, new = opt.update(grads, state, 0, params, found_inf=found)
    assert_same_bits(fmuon.apply_updates(params, updates), params)
    assert counts(new["missed"], 1) == dict.fromkeys(params, 0)
    moved, _ = opt.update(grads, state, 0, params, found_inf=found.logical_not())
    assert_same_bits(moved, opt.update(grads, state, 0, params)[0])


def test_found_inf_and_what_the_gradients_say_are_joined():
    opt, params, grads = make(nonfinite="skip"), leaves(), leaves()
    state = opt.init(params)
    for found, value in ((1.0, 0.0), (0.0, float("nan"))):
        grads["w"][0, 0] = value
        updates, _ = opt.update(grads, state, 0, params, found_inf=torch.tensor(found))
        assert all((update == 0).all() for update in updates.values())


def test_missing_and_absent_gradients_are_not_asked():
    opt, params, grads = make(nonfinite="skip"), leaves(), leaves()
    state = opt.init(params)
    grads["unused"] = None
    grads["tall"][0, 0] = float("nan")
    updates, new = opt.update(grads, state, 0, params, present={"tall": torch.tensor(False)})
    assert (updates["w"] != 0).all() and (updates["tall"] == 0).all()
    grads["w"][0, 0] = float("nan")
    updates, new = opt.update(grads, state, 0, params, present={"tall": torch.tensor(False)})
    # A leaf that sits out for two reasons sits out once.
    assert {int(missed) for missed in new["missed"].values()} == {1}
    assert updates["unused"] is None


def test_one_graph_and_no_look_at_values():
    opt, params = make(nonfinite="skip"), leaves()
    state = opt.init(params)
    counter = CompileCounterWithBackend("eager")
    compiled = fmuon.compile(opt.update, backend=counter)
    for step in range(4):
        grads = leaves()
        grads["stack"][0, 0, 0] = float("nan") if step % 2 else 1.0
        found = torch.tensor(float(step == 2))
        result = compiled(grads, state, step, params, found_inf=found)
        assert_close(result, opt.update(grads, state, step, params, found_inf=found))
        state = result[1]
    assert counter.frame_count == 1
    assert counts(state["missed"], 4) == dict.fromkeys(params, 1)


def test_under_vmap_each_member_is_skipped_on_its_own():
    opt = fmuon.muon(0.1, nonfinite="skip", labels={"w": "muon", "bias": "auxiliary"})
    params = {"w": torch.randn(3, 4, 6), "bias": torch.randn(3, 6)}
    grads = {"w": torch.randn(3, 4, 6), "bias": torch.randn(3, 6)}
    grads["bias"][1, 2] = float("inf")
    state = opt.init({name: leaf[0] for name, leaf in params.items()})

    def step(params, grads):
        return opt.update(grads, state, 0, params)[0]

    updates = torch.func.vmap(step)(params, grads)
    moved = [[bool((u != 0).any()) for u in updates[name]] for name in ("w", "bias")]
    assert moved == [[True, False, True]] * 2


def test_meta_gradients_through_a_skipped_step_are_those_of_the_run_without_it():
    grads = [torch.randn(3, 4) for _ in range(3)]
    bad = torch.full((3, 4), float("inf"))

    def loss(rate, sequence):
        opt = fmuon.muon(nonfinite="skip", differentiable=True)
        params = {"w": torch.ones(3, 4)}
        state = opt.init(params)
        for step, grad in enumerate(sequence):
            updates, state = opt.update({"w": grad}, state, step, params, lr=rate)
            params = fmuon.apply_updates(params, updates)
        return params["w"].square().sum()

    def slope(sequence):
        rate = torch.tensor(0.1, requires_grad=True)
        return torch.autograd.grad(loss(rate, sequence), rate)[0]

    assert_close(slope([grads[0], bad, *grads[1:]]), slope(grads))


def test_large_gradients_are_finite():
    tensors = [torch.full((300,), 6e4, dtype=torch.float16), torch.full((9,), 3e38), torch.empty(0)]
    assert all_finite(tensors) and all_finite([])
    assert not all_finite([*tensors, torch.tensor([1.0, float("nan")])])
    assert not all_finite([*tensors, torch.tensor(float("-inf"))])


def test_errors():
    opt, params = make(), leaves()
    with pytest.raises(fmuon.ConfigurationError, match=r"nonfinite='ignore'; known: 'propagate', "):
        fmuon.muon(nonfinite="ignore")
    for found in (True, torch.zeros(1)):
        with pytest.raises(fmuon.ConfigurationError, match=r"found_inf=.*: give a 0-d tensor"):
            opt.update(params, opt.init(params), 0, params, found_inf=found)


# ---- FMuon ---------------------------------------------------------------------------------------


def model():
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3))


def step(module, optimizer, seed, bad=None):
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    if bad is not None:
        module[2].weight.grad[0, 0] = bad
    optimizer.step()


@pytest.mark.parametrize("mode", [False, "default"])
def test_the_shim_leaves_parameters_state_and_counts_alone(mode, counter):
    module = model()
    straight = copy.deepcopy(module)
    options = {"lr": 0.01, "weight_decay": 0.1, "nonfinite": "skip", "compile": mode}
    optimizer, plain = fmuon.FMuon(module, **options), fmuon.FMuon(straight, **options)
    for seed in range(3):
        step(module, optimizer, seed)
        before = copy.deepcopy((module.state_dict(), optimizer.state_dict()["state"]))
        step(module, optimizer, seed, bad=float("inf"))
        after = module.state_dict(), optimizer.state_dict()["state"]
        assert_same_bits(dict(enumerate(after)), dict(enumerate(before)))
        step(straight, plain, seed)
    assert_same_bits(dict(module.state_dict()), dict(straight.state_dict()))
    assert counter.frame_count == (2 if mode else 0)
