# SPDX-License-Identifier: Apache-2.0
import pytest
import references
import torch
from expecttest import assert_expected_inline
from strategies import refusal
from torch.testing import assert_close

import fmuon

EXACT = fmuon.NewtonSchulz(dtype="float64", eps=0.0)


def normuon_step(w, g, m, v, *, lr, b, beta2, axis):
    """(W', M', v') line by line; v has one entry per row, or per index of the longer side."""
    m = b * m + (1 - b) * g
    o = references.newton_schulz(m) if m.shape[0] <= m.shape[1] else references.newton_schulz(m.T).T
    over = 1 if axis == "rows" or w.shape[0] >= w.shape[1] else 0
    v = beta2 * v + (1 - beta2) * (o * o).mean(over, keepdim=True)
    even = o / v.sqrt()
    return w - lr * even * o.norm() / even.norm(), m, v


@pytest.mark.parametrize("axis", ["rows", "long"])
def test_normuon_follows_its_formula_in_stacks_of_wide_and_tall(axis):
    shapes = {"wide": (4, 9), "tall": (9, 4), "tall.2": (9, 4), "square": (5, 5), "x": (3, 4, 9)}
    opt = fmuon.muon(
        0.1, momentum=0.9, nesterov=False, bias_correction=False, orthogonalize=EXACT,
        scale="none", second_moment=fmuon.NorMuon(0.8, axis, eps=0.0),
        labels={"x": fmuon.Matrix(1, 2), "re:.*": "muon"},
    )  # fmt: skip
    params = {k: torch.randn(s, dtype=torch.float64) for k, s in shapes.items()}
    expected = {k: list(p) if p.ndim == 3 else [p] for k, p in params.items()}
    kept = {k: [(0.0, 0.0)] * len(matrices) for k, matrices in expected.items()}
    state = opt.init(params)
    for step in range(5):
        grads = {k: torch.randn_like(p) for k, p in params.items()}
        updates, state = opt.update(grads, state, step)
        params = fmuon.apply_updates(params, updates)
        for k, matrices in expected.items():
            for i, g in enumerate(grads[k] if grads[k].ndim == 3 else [grads[k]]):
                matrices[i], *kept[k][i:i + 1] = _split(
                    normuon_step(matrices[i], g, *kept[k][i], lr=0.1, b=0.9, beta2=0.8, axis=axis)
                )  # fmt: skip
    for k, p in params.items():
        assert_close(p, torch.stack(expected[k]).reshape(p.shape), rtol=1e-9, atol=1e-10)
        v = torch.stack([v for _, v in kept[k]]).reshape(state["second_moment"][k].shape)
        assert_close(state["second_moment"][k], v, rtol=1e-9, atol=1e-12)


def _split(stepped):
    w, m, v = stepped
    return w, (m, v)


@pytest.mark.parametrize(
    ("axis", "view", "shape", "kept"),
    [
        ("rows", fmuon.Matrix(), (4, 9), (4, 1)),
        ("rows", fmuon.Matrix(1, 0), (4, 9), (1, 9)),
        ("long", fmuon.Matrix(), (4, 9), (1, 9)),
        ("long", fmuon.Matrix(1, 0), (4, 9), (1, 9)),
        ("long", fmuon.Matrix(), (9, 4), (9, 1)),
        ("rows", fmuon.Matrix(0, (1, 2, 3)), (6, 4, 3, 2), (6, 1, 1, 1)),
        ("long", fmuon.Matrix(0, (1, 2, 3)), (6, 4, 3, 2), (1, 4, 3, 2)),
        ("rows", fmuon.Matrix(blocks=(2, 4)), (6, 3), (6, 1)),
    ],
)
def test_what_is_kept_has_the_axes_of_the_leaf(axis, view, shape, kept):
    opt = fmuon.muon(second_moment=fmuon.NorMuon(axis=axis), labels={"w": view})
    params = {"w": torch.randn(shape)}
    state = opt.init(params)
    assert state["second_moment"]["w"].shape == kept
    updates, after = opt.update(params, state, 0)
    assert updates["w"].shape == shape and after["second_moment"]["w"].shape == kept
    assert (
        after["second_moment"]["w"].untyped_storage().nbytes()
        == 4 * after["second_moment"]["w"].numel()
    )


def test_the_norm_of_the_factor_is_kept():
    grads = {"w": torch.randn(6, 10, dtype=torch.float64)}
    plain, even = (
        fmuon.muon(1.0, orthogonalize=EXACT, second_moment=method) for method in (None, "normuon")
    )
    updates = [opt.update(grads, opt.init(grads), 0)[0]["w"] for opt in (plain, even)]
    assert_close(updates[0].norm(), updates[1].norm())
    assert not torch.allclose(updates[0], updates[1])


def test_a_zero_gradient_gives_a_zero_update():
    zeros = {"w": torch.zeros(3, 5)}
    opt = fmuon.muon(second_moment="normuon")
    updates, _ = opt.update(zeros, opt.init(zeros), 0)
    assert not updates["w"].any()


def test_in_place_and_skipped_and_masked():
    params = {"a": torch.randn(3, 5), "b": torch.randn(5, 3)}
    opt = fmuon.muon(0.1, second_moment="normuon")
    state = opt.init(params)
    updates, new = opt.update(params, state, 0)
    own = {k: p.clone() for k, p in params.items()}
    fmuon.update_(opt, own, params, state, 0)
    assert_close(own, fmuon.apply_updates(params, updates))
    assert_close(state, new)
    flags = {"b": torch.tensor(False)}
    _, after = opt.update(params, new, 1, present=flags)
    assert_close(after["second_moment"]["b"], new["second_moment"]["b"], rtol=0, atol=0)
    assert not torch.equal(after["second_moment"]["a"], new["second_moment"]["a"])


def test_errors():
    params = {"w": torch.randn(4, 6)}
    plain, normuon = fmuon.muon(), fmuon.muon(second_moment="normuon")
    long = fmuon.muon(second_moment=fmuon.NorMuon(axis="long"))
    blocks = {"w": fmuon.Matrix(blocks_in=(3, 3))}
    assert_expected_inline(
        "\n".join(
            refusal(fmuon.FMuonError, function)
            for function in (
                lambda: fmuon.NorMuon(beta=1.0),
                lambda: fmuon.NorMuon(axis="columns"),
                lambda: fmuon.NorMuon(eps=-1.0),
                lambda: fmuon.muon(second_moment="adam"),
                lambda: fmuon.muon(second_moment=0.95),
                lambda: fmuon.muon(second_moment="normuon", labels=blocks).init(params),
                lambda: normuon.update(params, plain.init(params), 0),
                lambda: plain.update(params, normuon.init(params), 0),
                lambda: long.update(params, normuon.init(params), 0),
            )
        ),
        """\
NorMuon: beta=1.0: give a number that is not negative and below 1
NorMuon: axis='columns'; known: 'rows', 'long'
NorMuon: eps=-1.0: give a number that is not negative and finite
unknown second_moment 'adam'; known: 'normuon', 'adamuon'; did you mean
'adamuon'?
second_moment=0.95; known: None, a fmuon.NorMuon or fmuon.AdaMuon, 'normuon',
'adamuon'
'w': NorMuon(axis='rows') can't average across the blocks (4,) x (3, 3); label
the leaf without them
no state of fmuon for this opt: it has the keys ['auxiliary', 'missed',
'momentum'] and lacks ['second_moment']; make it with init
'w': the default says Matrix(fan_out=0, fan_in=1, blocks=None, blocks_in=None,
scale=None), but the state holds 'momentum', 'second_moment' for it; use the opt
that made this state
'w': the state's 'second_moment' has the shape (4, 1), this opt keeps (1, 6);
use the opt that made this state""",
    )


def test_compiles_into_one_graph():
    params = {"a": torch.randn(3, 5), "b": torch.randn(5, 3), "c": torch.randn(4, 4)}
    opt = fmuon.muon(0.1, second_moment="normuon", decay="cautious", weight_decay=0.1,
                     adaptive=True, momentum_dtype=torch.bfloat16)  # fmt: skip
    state = opt.init(params)
    compiled = torch.compile(opt.update, backend="aot_eager", fullgraph=True)
    step = torch.tensor(0)
    ours, theirs = (f(params, state, step, params) for f in (opt.update, compiled))
    assert_close(ours, theirs)


def test_a_dead_row_does_not_make_meta_gradients_nan():
    opt = fmuon.muon(differentiable=True, second_moment="normuon")
    grad = torch.randn(4, 6)
    grad[1] = 0
    grad.requires_grad_()
    updates, _ = opt.update({"w": grad}, opt.init({"w": grad}), 0)
    updates["w"].sum().backward()
    assert grad.grad.isfinite().all()


def test_a_tall_leaf_compiles_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    params = {"w": torch.randn(6, 4), "v": torch.randn(4, 6)}
    opt = fmuon.muon(second_moment="normuon")
    update, state = torch.compile(opt.update, backend=counter, fullgraph=True), opt.init(params)
    for step in range(4):
        _, state = update(params, state, torch.tensor(step))
    assert counter.frame_count == 1


def test_another_axis_is_no_change_of_rows():
    params = {"w": torch.randn(16, 8)}
    opt = fmuon.muon(second_moment=fmuon.NorMuon(axis="long"))
    state = opt.init(params)
    shorter = {"w": torch.randn(4, 8)}
    with pytest.raises(fmuon.StateError, match=r"'w'.*drop the leaf and add it"):
        fmuon.adapt_state(opt, state, shorter, 1, resize=["w"])


@pytest.mark.parametrize(("norm", "size"), [("add", 1.0 + 0.5), ("clamp", 1.0), ("clamp", 0.25)])
def test_eps_is_added_to_the_norm_or_bounds_it(norm, size):
    size = min(size, 1.0) if norm == "clamp" else 1.0
    factor = torch.eye(3, 4) * size
    method = fmuon.NorMuon(beta=0.0, eps=0.5, norm=norm)
    found, moment = method(factor, torch.zeros(1, 3, 4)[0], torch.ones(()), [False])
    even = factor / (moment.sqrt() + 0.5)
    divisor = even.norm() + 0.5 if norm == "add" else max(float(even.norm()), 0.5)
    torch.testing.assert_close(found, even * factor.norm() / divisor)
