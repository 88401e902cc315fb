# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fmuon
from fmuon.metrics import METRICS

ALL = tuple(METRICS)
LABELS = {
    "stack": fmuon.Matrix(1, 2),
    "fused": fmuon.Matrix(blocks=(4, 2)),
    "re:.*": "muon",
}


def leaves():
    shapes = {"w": (4, 6), "tall": (6, 4), "stack": (3, 2, 5), "fused": (6, 4), "bias": (6,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def make(**options):
    labels = {"bias": "auxiliary"} | LABELS
    rule = fmuon.adamw(lr_scale=0.5)
    return fmuon.muon(0.1, weight_decay=0.1, labels=labels, auxiliary=rule, **options)


def matrices(name, leaf):
    if name == "fused":
        return list(leaf.split((4, 2)))
    return list(leaf) if leaf.ndim == 3 else [leaf]


def test_each_is_what_it_says_of_the_update():
    """Recomputed from updates, weights and the factors of single matrices."""
    params, grads = leaves(), leaves()
    opt = make(metrics=ALL, momentum=0.0, bias_correction=False, nesterov=False)
    updates, state = opt.update(grads, opt.init(params), 0, params)
    found = state["metrics"]
    iteration = fmuon.NewtonSchulz()
    for name, update in updates.items():
        assert_close(found[f"fmuon/update_rms/{name}"], update.square().mean().sqrt())
        assert_close(found[f"fmuon/update_ratio/{name}"], update.norm() / params[name].norm())
        if name == "bias":
            assert_close(float(found["fmuon/lr/bias"]), 0.05)
            assert "fmuon/orthogonality/bias" not in found
            continue
        own = matrices(name, grads[name])
        scales = [0.2 * math.sqrt(max(m.shape)) for m in own]
        assert_close(float(found[f"fmuon/lr/{name}"]), 0.1 * sum(scales) / len(scales))
        errors = [torch.linalg.svdvals(iteration(m)).square().sub(1).square() for m in own]
        expected = sum(float(e.mean().sqrt()) for e in errors) / len(errors)
        assert_close(float(found[f"fmuon/orthogonality/{name}"]), expected, rtol=1e-3, atol=1e-4)
    assert len(found) == 4 * 5 - 1 + 1


def test_state_has_the_same_keys_before_and_after():
    opt, params = make(metrics=ALL), leaves()
    state = opt.init(params)
    _, new = opt.update(leaves(), state, 0, params)
    assert list(new["metrics"]) == list(state["metrics"])
    assert all(v.shape == () and v.dtype == torch.float32 for v in new["metrics"].values())
    assert not any(state["metrics"].values())


def test_nothing_is_computed_or_kept_unless_asked():
    opt, params = make(), leaves()
    state = opt.init(params)
    assert "metrics" not in state and "metrics" not in opt.update(leaves(), state, 0, params)[1]


def test_in_place_equals_pure_and_the_update_does_not_change():
    opt, params, grads = make(metrics=ALL), leaves(), leaves()
    state = opt.init(params)
    updates, new = opt.update(grads, state, 0, params)
    plain = make()
    assert_close(updates, plain.update(grads, plain.init(params), 0, params)[0], rtol=0, atol=0)
    held = state["metrics"]
    fmuon.update_(opt, params, grads, state, 0)
    assert_close(state["metrics"], new["metrics"], rtol=0, atol=0)
    assert state["metrics"] is held


def test_a_leaf_that_sits_out_keeps_its_values():
    opt, params = make(metrics=("update_rms",)), leaves()
    _, first = opt.update(leaves(), opt.init(params), 0, params)
    grads = leaves() | {"w": None}
    present = {"tall": torch.tensor(False)}
    _, second = opt.update(grads, first, 1, params, present=present)
    same = {k for k in first["metrics"] if torch.equal(first["metrics"][k], second["metrics"][k])}
    assert same == {"fmuon/update_rms/w", "fmuon/update_rms/tall"}


def test_skipped_steps_are_counted_and_leave_the_other_metrics_finite():
    opt, params = make(metrics=ALL, nonfinite="skip"), leaves()
    state = opt.init(params)
    for step in range(4):
        grads = leaves()
        if step in (1, 2):
            grads["bias"][0] = float("nan")
        _, state = opt.update(grads, state, step, params)
    assert state["metrics"]["fmuon/skipped_steps"] == 2
    assert all(v.isfinite() for v in state["metrics"].values())


def test_a_state_without_metrics_may_go_on_with_them():
    params = leaves()
    plain, asking = make(), make(metrics=("update_rms",))
    _, state = plain.update(leaves(), plain.init(params), 0, params)
    _, new = asking.update(leaves(), state, 1, params)
    assert new["metrics"]["fmuon/update_rms/w"] > 0
    fmuon.update_(asking, params, leaves(), state, 1)
    assert state["metrics"]["fmuon/update_rms/w"] > 0


def test_metrics_do_not_stand_in_the_way_of_a_changed_model():
    opt, params = make(metrics=ALL), leaves()
    _, state = opt.update(leaves(), opt.init(params), 0, params)
    late = params | {"late": torch.randn(3, 3)}
    adapted = fmuon.adapt_state(opt, state, late, 1, add=["late"])
    _, new = opt.update(leaves() | {"late": torch.randn(3, 3)}, adapted, 1, late)
    assert new["metrics"]["fmuon/update_rms/late"] > 0


def test_errors():
    with pytest.raises(fmuon.ConfigurationError, match=r"unknown metric 'update_rsm'.*update_rms"):
        fmuon.muon(metrics=("update_rsm",))
    opt = fmuon.muon(metrics=("update_ratio",))
    params = {"w": torch.randn(3, 3)}
    with pytest.raises(fmuon.ConfigurationError, match="the metric 'update_ratio' needs the param"):
        opt.update(params, opt.init(params), 0)
    with pytest.raises(fmuon.ConfigurationError, match="no metrics were asked for"):
        fmuon.FMuon(nn.Linear(3, 3)).metrics()


@pytest.mark.parametrize("mode", [False, "default"])
def test_the_shim_gives_a_flat_dict_of_numbers(mode, counter):
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    optimizer = fmuon.FMuon(model, lr=0.1, metrics=ALL, nonfinite="skip", compile=mode)
    assert optimizer.metrics() == {}
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        if step == 1:
            model[0].bias.grad[0] = float("inf")
        optimizer.step()
    found = optimizer.metrics()
    for (name, new), old in zip(model.named_parameters(), before, strict=True):
        rms = (new.detach() - old).square().mean().sqrt()
        assert_close(found[f"fmuon/update_rms/{name}"], float(rms), rtol=1e-4, atol=0)
    assert found["fmuon/skipped_steps"] == 1
    assert_close(found["fmuon/lr/1.bias"], 0.1)
    assert all(type(value) is float for value in found.values())
    assert counter.frame_count == (1 if mode else 0)
    assert "metrics" not in str(optimizer.state_dict())


def test_a_leaf_may_be_called_metrics():
    opt = fmuon.muon(0.1, labels={"metrics": "muon"}, metrics=("update_rms",))
    params = {"metrics": torch.randn(3, 4)}
    _, state = opt.update({"metrics": torch.randn(3, 4)}, opt.init(params), 0)
    adapted = fmuon.adapt_state(opt, state, params, 1)
    assert torch.equal(adapted["momentum"]["metrics"], state["momentum"]["metrics"])


def test_metrics_of_a_differentiable_update_carry_no_graph():
    opt = fmuon.muon(0.1, metrics=("update_rms", "orthogonality"), differentiable=True)
    params = {"w": torch.randn(3, 4, requires_grad=True)}
    _, state = opt.update({"w": params["w"] * 2}, opt.init(params), 0)
    assert not any(value.requires_grad for value in state["metrics"].values())
