# SPDX-License-Identifier: Apache-2.0
import copy
import itertools

import pytest
import references
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import fmuon

# Twenty float64 steps of an iteration with slope 485 on small singular values.
DOUBLE = {"rtol": 1e-9, "atol": 1e-11}
EXACT = fmuon.NewtonSchulz(dtype="float32", eps=0.0)


def matrices(dtype=torch.float64):
    shapes = {"wide": (4, 9), "tall": (9, 4), "square": (6, 6), "second": (6, 6), "row": (2, 30)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def gradients(params, steps):
    return [
        {k: torch.randn_like(p) * 10.0 ** (i % 3) for k, p in params.items()} for i in range(steps)
    ]


def clone(tree):
    return copy.deepcopy(tree)


def assert_same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# ---- against the formulas ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nesterov", "bias_correction"), itertools.product([True, False], repeat=2)
)
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", "spectral", "none"])
def test_matrices_follow_the_formula_for_20_steps(nesterov, bias_correction, scale):
    params = matrices()
    expected = clone(params)
    momentum = {k: torch.zeros_like(p) for k, p in params.items()}
    opt = fmuon.muon(
        0.02,
        momentum=0.9,
        nesterov=nesterov,
        bias_correction=bias_correction,
        weight_decay=0.1,
        scale=scale,
        orthogonalize=fmuon.NewtonSchulz(eps=0.0),
    )
    state = opt.init(params)
    for step, grads in enumerate(gradients(params, 20)):
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        for k, w in expected.items():
            expected[k], momentum[k] = references.muon_step(
                w, grads[k], momentum[k], step + 1, lr=0.02, b=0.9, nesterov=nesterov,
                bias_correction=bias_correction, weight_decay=0.1, scale=scale,
            )  # fmt: skip
    assert_close(params, expected, **DOUBLE)
    assert_close(state["momentum"], momentum, **DOUBLE)


def train_vectors(rule, steps=20, **options):
    params = {"a": torch.randn(5, dtype=torch.float64), "b": torch.randn(3, 2, dtype=torch.float64)}
    opt = fmuon.muon(0.03, auxiliary=rule, labels={"re:.*": "auxiliary"}, **options)
    start, state = clone(params), opt.init(params)
    history = gradients(params, steps)
    for step, grads in enumerate(history):
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
    return start, history, params, state


@pytest.mark.parametrize(
    ("rule", "peer"),
    [
        (
            fmuon.adamw((0.8, 0.95), eps=1e-6, weight_decay=0.2),
            lambda p: torch.optim.AdamW(p, 0.03, (0.8, 0.95), 1e-6, weight_decay=0.2),
        ),
        (fmuon.adamw(), lambda p: torch.optim.AdamW(p, 0.03, weight_decay=0.0)),
        (fmuon.sgd(), lambda p: torch.optim.SGD(p, 0.03)),
        (fmuon.sgd(0.9), lambda p: torch.optim.SGD(p, 0.03, momentum=0.9)),
        (fmuon.sgd(0.9, lr_scale=0.1), lambda p: torch.optim.SGD(p, 0.003, momentum=0.9)),
    ],
)
def test_auxiliary_rules_equal_torch_optim(rule, peer):
    start, history, params, _ = train_vectors(rule)
    leaves = [torch.nn.Parameter(start[k]) for k in start]
    optimizer = peer(leaves)
    for grads in history:
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
    assert_close(list(params.values()), [leaf.detach() for leaf in leaves], **DOUBLE)


def test_nadamw_and_lion_follow_the_formulas():
    start, history, params, state = train_vectors(fmuon.nadamw((0.9, 0.99)), weight_decay=0.1)
    w, m, v = start["a"], 0, 0
    for t, grads in enumerate(history, 1):
        w, m, v = references.adamw_step(
            w, grads["a"], m, v, t, lr=0.03, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1,
            nesterov=True,
        )  # fmt: skip
    assert_close(params["a"], w, **DOUBLE)
    assert_close(state["auxiliary"]["nu"]["a"], v, **DOUBLE)

    start, history, params, state = train_vectors(fmuon.lion(), weight_decay=0.1)
    w, m = start["b"], torch.zeros_like(start["b"])
    for grads in history:
        w, m = references.lion_step(w, grads["b"], m, lr=0.03, betas=(0.9, 0.99), weight_decay=0.1)
    assert_close(params["b"], w, **DOUBLE)
    assert_close(state["auxiliary"]["mu"]["b"], m, **DOUBLE)


def test_one_by_one_trajectory():
    for nesterov, expected in (
        (True, [0.930356, 0.860713, 0.930356]),
        (False, [0.930356, 0.860713, 0.791069]),
    ):
        opt = fmuon.muon(
            0.1, nesterov=nesterov, bias_correction=False, scale="original", orthogonalize=EXACT,
            labels={"w": "muon"},
        )  # fmt: skip
        params = {"w": torch.ones(1, 1)}
        state, seen = opt.init(params), []
        for step, sign in enumerate([1.0, 1.0, -1.0]):
            updates, state = opt.update({"w": torch.full((1, 1), sign)}, state, step)
            params = fmuon.apply_updates(params, updates)
            seen.append(params["w"].item())
        assert seen == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("lr", [1e-3, 1e3])
def test_no_update_is_clipped(lr):
    """However large: |dW| = lr scale |O|."""
    params = {"w": torch.zeros(24, 16, dtype=torch.float64), "v": torch.zeros(5)}
    grads = {k: torch.randn_like(p) for k, p in params.items()}
    opt = fmuon.muon(lr, labels={"v": "auxiliary"})
    updates, _ = opt.update(grads, opt.init(params), 0, params)
    new = fmuon.apply_updates(params, updates)
    factor = references.newton_schulz(grads["w"])
    size = lr * references.SCALES["match_rms_adamw"](24, 16) * factor.norm()
    assert_close(new["w"].norm(), size, rtol=1e-6, atol=0)
    # Adam's first step.
    assert_close(new["v"], -lr * grads["v"].sign(), rtol=1e-5, atol=0)


def test_the_default_update_has_the_rms_of_adamw():
    params = {"w": torch.randn(64, 256)}
    updates, _ = fmuon.update(params, fmuon.init(params), 0, lr=1.0)
    assert updates["w"].square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


# ---- views, buckets, strides ---------------------------------------------------------------------


def one_step(params, grads, **options):
    opt = fmuon.muon(0.1, orthogonalize=EXACT, **options)
    return opt.update(grads, opt.init(params), 0)[0]


def test_a_leaf_with_blocks_or_stack_axes_moves_like_its_matrices_alone():
    q, k, v = (torch.randn(size, 8) for size in (8, 4, 4))
    experts = torch.randn(3, 6, 5)
    fused = one_step(
        {"qkv": torch.zeros(16, 8), "experts": torch.zeros(3, 6, 5)},
        {"qkv": torch.cat([q, k, v]), "experts": experts},
        labels={"qkv": fmuon.Matrix(blocks=(8, 4, 4)), "experts": fmuon.Matrix(1, 2)},
    )
    alone = {"q": q, "k": k, "v": v, **{f"e{i}": e for i, e in enumerate(experts)}}
    single = one_step({n: torch.zeros_like(g) for n, g in alone.items()}, alone)
    assert_close(fused["qkv"], torch.cat([single["q"], single["k"], single["v"]]))
    assert_close(fused["experts"], torch.stack([single[f"e{i}"] for i in range(3)]))


def test_layout_changes_the_scale_only():
    grad = torch.randn(768, 96)
    labels = {"w": fmuon.Matrix(1, 0)}
    out_in = one_step({"w": grad}, {"w": grad}, scale="original")["w"]
    in_out = one_step({"w": grad}, {"w": grad}, scale="original", labels=labels)["w"]
    assert_close(out_in, in_out * 8**0.5)


def test_a_convolution_is_its_flattened_matrix():
    grad = torch.randn(8, 3, 2, 2)
    conv = one_step({"c": grad}, {"c": grad}, labels={"c": fmuon.Matrix(0, (1, 2, 3))})["c"]
    flat = one_step({"c": grad.flatten(1)}, {"c": grad.flatten(1)})["c"]
    assert_close(conv, flat.view_as(conv))


@pytest.mark.parametrize("kind", ["channels_last", "transposed", "sliced"])
def test_strides_of_params_change_nothing_and_come_back(kind):
    if kind == "channels_last":
        grad = torch.randn(8, 3, 4, 4)
        strided = grad.to(memory_format=torch.channels_last)
        labels = {"w": fmuon.Matrix(0, (1, 2, 3))}
    else:
        grad, labels = torch.randn(6, 10), None
        strided = grad.T.contiguous().T
        if kind == "sliced":
            strided = torch.stack([grad, grad], 2)[:, :, 0]
    plain = one_step({"w": grad}, {"w": grad}, labels=labels)["w"]
    result = one_step({"w": strided}, {"w": strided}, labels=labels)["w"]
    assert_close(result, plain)
    assert result.stride() == torch.zeros_like(strided).stride()


def test_tall_updates_are_contiguous_like_their_params():
    updates = one_step({"w": torch.zeros(9, 4)}, {"w": torch.randn(9, 4)})
    assert updates["w"].is_contiguous()


def test_the_size_of_stacks_changes_nothing():
    grads = {f"w{i}": torch.randn(12, 8) for i in range(7)}
    whole = one_step(grads, grads)
    for limit in (1, 12 * 8 * 4 * 2, 12 * 8 * 4 * 3 + 1):
        assert_close(one_step(grads, grads, max_stack_bytes=limit), whole)


def test_the_order_of_leaves_changes_nothing():
    grads = matrices(torch.float32)
    forward = one_step(grads, grads)
    turned = dict(reversed(grads.items()))
    backward = one_step(turned, turned)
    assert list(backward) == list(turned)
    assert_same_bits({k: backward[k] for k in forward}, forward)


def test_leaves_without_elements_and_with_one_row():
    grads = {
        "none": torch.empty(0, 5),
        "no": torch.empty(4, 0),
        "row": torch.randn(1, 6),
        "w": torch.randn(3, 4),
    }
    updates = one_step(grads, grads, labels={"row": "muon"}, scale="none")
    assert updates["none"].shape == (0, 5) and updates["no"].shape == (4, 0)
    direction = grads["row"] / grads["row"].norm()
    assert_close(
        updates["row"], -0.1 * references.scalar_response(1.0) * direction, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("power", [-40, -30, -12, 0, 18, 37])
def test_gradients_of_any_scale_give_the_same_update(power):
    grad = torch.randn(24, 16)
    expected = one_step({"w": grad}, {"w": grad})["w"]
    scaled = (grad.double() * 10.0**power).float()
    error = (one_step({"w": grad}, {"w": scaled})["w"] - expected).norm() / expected.norm()
    # The average holds 0.05 G: at 1e-40 that is a multiple of 1.4e-45 with 12 bits.
    assert error < (1e-2 if power < -38 else 1e-5)


def test_stack_isolation_of_nan():
    grads = {f"w{i}": torch.randn(32, 48) for i in range(4)}
    opt = fmuon.muon(0.1)
    state = opt.init(grads)
    clean, _ = opt.update(grads, state, 0)
    grads["w2"][3, 4] = float("nan")
    dirty, _ = opt.update(grads, state, 0)
    for k in ("w0", "w1", "w3"):
        assert torch.equal(clean[k], dirty[k])
    assert dirty["w2"].isnan().any()


# ---- purity and structure ------------------------------------------------------------------------


RULES = [fmuon.adamw(), fmuon.nadamw(), fmuon.lion(), fmuon.sgd(), fmuon.sgd(0.9)]


def mixed_params(dtype=torch.float32):
    return {
        "layers": [
            {"w": torch.randn(8, 5, dtype=dtype), "b": torch.randn(5, dtype=dtype)},
            {"w": torch.randn(5, 8, dtype=dtype), "b": None},
        ],
        "embed": torch.randn(11, 4, dtype=dtype),
    }


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_nothing_that_is_passed_in_is_written(rule, dtype, nesterov):
    opt = fmuon.muon(0.1, auxiliary=rule, weight_decay=0.1, nesterov=nesterov)
    params, grads = mixed_params(dtype), mixed_params(dtype)
    _, state = opt.update(grads, opt.init(params), 0, params)
    before = clone((params, grads, state))
    first, new = opt.update(grads, state, 1, params)
    assert_same_bits((params, grads, state), before)
    again, new_again = opt.update(grads, state, 1, params)
    assert_same_bits((again, new_again), (first, new))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_average_of_ones_is_a_tenth_after_a_step_at_lr_0(dtype, nesterov):
    opt = fmuon.muon(0.0, momentum=0.9, nesterov=nesterov)
    params = {"w": torch.randn(8, 5, dtype=dtype)}
    _, state = opt.update({"w": torch.ones(8, 5, dtype=dtype)}, opt.init(params), 0)
    assert_close(state["momentum"]["w"], torch.full((8, 5), 0.1))


def test_updates_and_params_keep_structure_and_dtypes():
    params = mixed_params(torch.bfloat16)
    opt = fmuon.muon(0.1)
    updates, _ = opt.update(mixed_params(torch.bfloat16), opt.init(params), 0)
    assert updates["layers"][1]["b"] is None
    assert updates["layers"][0]["w"].dtype == torch.float32
    new = fmuon.apply_updates(params, updates)
    assert new["layers"][1]["b"] is None
    assert new["layers"][0]["w"].dtype == torch.bfloat16
    expected = (params["embed"].float() + updates["embed"]).bfloat16()
    assert torch.equal(new["embed"], expected)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_in_place_equals_pure_bit_by_bit(rule):
    opt = fmuon.muon(0.1, auxiliary=rule, weight_decay=0.1, max_stack_bytes=100)
    for dtype in (torch.float32, torch.bfloat16):
        params = mixed_params(dtype)
        state = opt.init(params)
        params_, state_ = clone((params, state))
        for step in range(3):
            grads = mixed_params(dtype)
            if step == 1:
                grads["layers"][0]["w"] = None
            updates, state = opt.update(grads, state, step, params)
            params = fmuon.apply_updates(params, updates)
            fmuon.update_(opt, params_, grads, state_, step)
        assert_same_bits((params_, state_), (params, state))


def test_in_place_does_nothing_at_all_where_it_raises():
    opt = fmuon.muon(0.1, weight_decay=0.1)
    params = mixed_params()
    state = opt.init(params)
    before = clone((params, state))
    grads = mixed_params()
    grads["embed"] = torch.randn(4, 11)
    with pytest.raises(fmuon.LeafError):
        fmuon.update_(opt, params, grads, state, 0)
    assert_same_bits((params, state), before)


def test_requires_grad_of_params_is_restored_and_updates_are_detached():
    params = {"w": torch.randn(3, 4, requires_grad=True), "b": torch.randn(3)}
    loss = (params["w"].sum() * 2 + params["b"].sum()).square()
    grads = {"w": torch.autograd.grad(loss, params["w"], create_graph=True)[0], "b": torch.ones(3)}
    updates, state = fmuon.update(grads, fmuon.init(params), 0)
    assert not updates["w"].requires_grad and not state["momentum"]["w"].requires_grad
    new = fmuon.apply_updates(params, updates)
    assert new["w"].requires_grad and new["w"].is_leaf and not new["b"].requires_grad


def test_state_is_plain_and_survives_a_checkpoint(tmp_path):
    opt = fmuon.muon(0.1, weight_decay=0.1)
    params = mixed_params()
    _, state = opt.update(mixed_params(), opt.init(params), 0, params)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    grads = mixed_params()
    assert_same_bits(opt.update(grads, loaded, 1, params), opt.update(grads, state, 1, params))


def test_every_leaf_of_the_state_owns_its_memory():
    params = {"a": torch.randn(4, 6), "b": torch.randn(6, 4), "c": torch.randn(4, 6)}
    params |= {"d": torch.randn(24), "e": torch.randn(24)}
    _, state = fmuon.update(params, fmuon.init(params), 0)
    for store in (state["momentum"], *state["auxiliary"].values()):
        for tensor in store.values():
            assert tensor.untyped_storage().nbytes() == 24 * 4
            assert tensor.is_contiguous()


def test_moments_are_float32_and_float64_for_float64():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        state = fmuon.init({"w": torch.randn(3, 4, dtype=dtype), "b": torch.randn(3, dtype=dtype)})
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        assert state["momentum"]["w"].dtype == expected
        assert state["auxiliary"]["nu"]["b"].dtype == expected


def test_float16_gradients_too_small_for_float16_averages_still_count():
    params = {"w": torch.ones(4, 4, dtype=torch.float16)}
    _, state = fmuon.update({"w": torch.full((4, 4), 3e-7).half()}, fmuon.init(params), 0)
    assert (state["momentum"]["w"] > 0).all()


def test_float32_gradients_of_bfloat16_params():
    params = {"w": torch.randn(4, 6).bfloat16()}
    grads = {"w": torch.randn(4, 6)}
    as_float = {"w": params["w"].float()}
    assert_same_bits(
        fmuon.update(grads, fmuon.init(params), 0), fmuon.update(grads, fmuon.init(as_float), 0)
    )


# ---- missing gradients, late leaves --------------------------------------------------------------


def test_zero_and_none_differ():
    params = {"w": torch.ones(4, 4), "other": torch.ones(4, 4)}
    opt = fmuon.muon(0.1, weight_decay=0.1)
    state = opt.init(params)
    updates, after = opt.update({"w": torch.zeros(4, 4), "other": None}, state, 0, params)
    new = fmuon.apply_updates(params, updates)
    assert_close(new["w"], torch.full((4, 4), 0.99))
    assert torch.equal(after["momentum"]["w"], torch.zeros(4, 4))
    assert updates["other"] is None and torch.equal(new["other"], params["other"])
    assert after["momentum"]["other"] is state["momentum"]["other"]
    assert after["missed"]["other"] == 1 and after["missed"]["w"] == 0
    still = fmuon.muon(0.1)
    updates, _ = still.update({"w": torch.zeros(4, 4), "other": None}, state, 0)
    assert torch.equal(fmuon.apply_updates(params, updates)["w"], params["w"])


def test_missing_zero_is_a_zero_gradient_and_error_names_the_leaf():
    params = mixed_params()
    first, grads = mixed_params(), mixed_params()
    zeros = clone(grads)
    for path in ("w", "b"):
        grads["layers"][0][path] = None
        zeros["layers"][0][path] = torch.zeros_like(params["layers"][0][path])
    as_zero, skip = fmuon.muon(0.1, missing="zero"), fmuon.muon(0.1)
    _, state = skip.update(first, skip.init(params), 0)
    assert_same_bits(as_zero.update(grads, state, 1), skip.update(zeros, state, 1))
    with pytest.raises(fmuon.LeafError, match=r"'layers\.0\.b'.*missing='error'"):
        fmuon.muon(0.1, missing="error").update(grads, state, 1)


def test_a_leaf_skipped_a_thousand_times_starts_like_a_fresh_one():
    params = {"w": torch.randn(6, 4), "b": torch.randn(4), "other": torch.randn(3, 3)}
    opt = fmuon.muon(0.1)
    state, fresh = opt.init(params), opt.init(params)
    idle = {"w": None, "b": None, "other": torch.randn(3, 3)}
    for step in range(1000):
        state["missed"] = dict(state["missed"])
        if step < 5:
            _, state = opt.update(idle, state, step)
        else:
            state["missed"] = {k: m + (k != "other") for k, m in state["missed"].items()}
    grads = {k: torch.randn_like(p) for k, p in params.items()}
    late, _ = opt.update(grads, state, 1000)
    first, _ = opt.update(grads, fresh, 0)
    assert_same_bits({k: late[k] for k in ("w", "b")}, {k: first[k] for k in ("w", "b")})
    joined, _ = opt.update(grads, opt.init(params, step=1000), 1000)
    assert_same_bits(joined, first)


def test_present_false_is_none_and_true_is_plain():
    params = mixed_params()
    opt = fmuon.muon(0.1, weight_decay=0.1)
    _, state = opt.update(mixed_params(), opt.init(params), 0, params)
    grads, without = mixed_params(), None
    without = clone(grads)
    grads["layers"][0]["w"].fill_(float("nan"))
    without["layers"][0]["w"] = None
    without["embed"] = None
    flags = {"layers.0.w": False, "embed": False, "layers.1.w": True}
    present = {path: torch.tensor(flag) for path, flag in flags.items()}
    masked, new = opt.update(grads, state, 1, params, present=present)
    skipped, expected = opt.update(without, state, 1, params)
    assert_same_bits(new, expected)
    assert_same_bits(masked["layers"][1], skipped["layers"][1])
    assert torch.equal(masked["embed"], torch.zeros_like(params["embed"]))
    assert torch.equal(masked["layers"][0]["w"], torch.zeros(8, 5))
    in_place, state_ = clone((params, state))
    fmuon.update_(opt, in_place, grads, state_, 1, present=present)
    assert_same_bits((in_place, state_), (fmuon.apply_updates(params, masked), new))


# ---- scalars -------------------------------------------------------------------------------------


def test_scalars_per_call_stand_in_for_the_configured_ones():
    params, grads = mixed_params(), mixed_params()
    options = {"weight_decay": 0.3, "momentum": 0.8}
    configured = fmuon.muon(0.05, auxiliary=fmuon.adamw((0.7, 0.8), eps=1e-3), **options)
    plain = fmuon.muon()
    _, state = configured.update(grads, configured.init(params), 0, params)
    expected = configured.update(grads, state, 1, params)
    for wrap in (float, torch.tensor, lambda v: lambda step: v * step):
        scalars = {k: wrap(v) for k, v in options.items()}
        result = plain.update(
            grads, state, 1, params, lr=wrap(0.05), betas=(wrap(0.7), wrap(0.8)), eps=wrap(1e-3),
            **scalars,
        )  # fmt: skip
        assert_close(result, expected, rtol=1e-5, atol=1e-7)


def test_a_dict_gives_leaves_scalars_of_their_own_within_one_stack():
    params = {k: torch.randn(4, 4) for k in "abc"}
    lr = {"a": 0.1, "b": torch.tensor(0.2)}
    updates, _ = fmuon.update(params, fmuon.init(params), 0, params, lr=lr, weight_decay={"b": 0.5})
    for k, (rate, decay) in {"a": (0.1, 0), "b": (0.2, 0.5), "c": (1e-3, 0)}.items():
        alone, _ = fmuon.update(
            {k: params[k]},
            fmuon.init({k: params[k]}),
            0,
            {k: params[k]},
            lr=rate,
            weight_decay=decay,
        )
        assert_close(updates[k], alone[k])


def test_weight_decay_is_decoupled_unscaled_and_times_lr():
    params = {"w": torch.randn(16, 4), "b": torch.randn(7)}
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    for scale in ("original", "match_rms_adamw"):
        opt = fmuon.muon(0.1, weight_decay=0.5, scale=scale, auxiliary=fmuon.adamw(lr_scale=0.5))
        updates, _ = opt.update(zeros, opt.init(params), 0, params)
        assert_close(updates, {"w": -0.05 * params["w"], "b": -0.025 * params["b"]})


def test_a_rule_may_have_a_weight_decay_of_its_own():
    params = {"w": torch.ones(4, 4), "b": torch.ones(4)}
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}

    def decays(opt, **scalars):
        updates, _ = opt.update(zeros, opt.init(params), 0, params, **scalars)
        return {k: round(-u.flatten()[0].item() / 0.1, 6) for k, u in updates.items()}

    own = fmuon.muon(0.1, weight_decay=0.5, auxiliary=fmuon.adamw(weight_decay=0.0))
    assert decays(own) == {"w": 0.5, "b": 0.0}
    assert decays(own, weight_decay=0.25) == {"w": 0.25, "b": 0.0}
    assert decays(own, weight_decay={"b": 0.75}) == {"w": 0.5, "b": 0.75}
    masked = fmuon.muon(0.1, weight_decay=lambda path, tensor: 0.5 * (tensor.ndim > 1))
    assert decays(masked) == {"w": 0.5, "b": 0.0}


def test_lr_0_moves_nothing():
    params = mixed_params()
    updates, _ = fmuon.muon(0.0, weight_decay=0.1).update(
        mixed_params(), fmuon.init(params), 0, params
    )
    assert_same_bits(fmuon.apply_updates(params, updates), params)


def test_named_rules_take_the_leaves_labelled_with_them():
    params = {"w": torch.randn(4, 4), "embed": torch.randn(5, 3), "b": torch.randn(3)}
    rules = {"rest": fmuon.adamw(), "tables": fmuon.lion(lr_scale=0.1)}
    opt = fmuon.muon(0.1, auxiliary=rules, labels={"embed": "tables"})
    state = opt.init(params)
    assert set(state["auxiliary"]["rest"]["nu"]) == {"b"}
    assert set(state["auxiliary"]["tables"]["mu"]) == {"embed"}
    updates, new = opt.update(params, state, 0)
    assert_close(updates["embed"], -0.01 * params["embed"].sign())
    assert new["auxiliary"]["tables"]["mu"]["embed"].abs().sum() > 0


# ---- torch.func ----------------------------------------------------------------------------------


def stacked(trees):
    return torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


# What a state may hold, beside the momentum.
ENSEMBLES = {
    **{str(rule): {"auxiliary": rule} for rule in RULES},
    "rules by name": {
        "auxiliary": {"a": fmuon.adamw(), "b": fmuon.lion()},
        "labels": {"v": "b", "x": fmuon.Matrix(1, 2)},
    },
    "second moment": {"second_moment": "normuon"},
    "metrics": {"metrics": ("update_rms", "update_ratio", "orthogonality", "lr", "skipped_steps")},
    "non-finite": {"nonfinite": "skip", "metrics": ("skipped_steps",)},
    "adaptive, cautious": {"adaptive": True, "decay": "cautious"},
    "low": {"momentum_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("kind", ENSEMBLES)
def test_an_ensemble_trained_by_vmap_is_the_loop_over_its_members(kind):
    options = {"labels": {"x": fmuon.Matrix(1, 2)}, **ENSEMBLES[kind]}
    opt = fmuon.muon(0.1, weight_decay=0.1, orthogonalize=EXACT, **options)
    shapes = {"w": (6, 4), "t": (4, 6), "x": (2, 4, 6), "b": (4,), "v": (4,)}

    def draw():
        return {k: torch.randn(shape) for k, shape in shapes.items()}

    def member(params, grads, state, step):
        updates, state = opt.update(grads, state, step, params)
        return fmuon.apply_updates(params, updates), state

    members = [draw() for _ in range(3)]
    params, states = stacked(members), [opt.init(model) for model in members]
    state = torch.func.vmap(opt.init)(params)
    assert_same_bits(state, stacked(states))
    together = torch.func.vmap(member, in_dims=(0, 0, 0, None))
    for step in range(3):
        grads = [draw() for _ in members]
        if kind == "non-finite":
            # Each member skips a step of its own.
            grads[step]["w"][0, 0] = float("nan")
        params, state = together(params, stacked(grads), state, step)
        loop = [member(*own, step) for own in zip(members, grads, states, strict=True)]
        members, states = ([pair[i] for pair in loop] for i in (0, 1))
        assert_close((params, state), stacked(loop), rtol=1e-4, atol=1e-5)
    if kind == "non-finite":
        assert state["metrics"]["fmuon/skipped_steps"].tolist() == [1, 1, 1]


def test_updates_are_applied_inside_a_transform_without_losing_its_gradient():
    params = {"w": torch.randn(3, 4), "b": torch.randn(3, requires_grad=True)}
    changes = {"w": torch.randn(3, 4), "b": torch.randn(3)}

    def loss(params):
        return sum(p.square().sum() for p in fmuon.apply_updates(params, changes).values())

    for take in (torch.func.grad(loss), torch.compile(torch.func.grad(loss), backend="eager")):
        slopes = take(params)
        for k, p in params.items():
            assert_close(slopes[k], 2 * (p + changes[k]))


def test_a_differentiable_update_passes_gradcheck():
    """With respect to all that is continuous: params, gradients, the state, scalars."""
    opt = fmuon.muon(differentiable=True)
    params = {"w": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    _, state = opt.update(params, opt.init(params), 0, params)

    def updated(lr, weight_decay, w, b, grad_w, grad_b, moment):
        old = state | {"momentum": {"w": moment}}
        own = {"w": w, "b": b}
        updates, new = opt.update(
            {"w": grad_w, "b": grad_b}, old, 1, own, lr=lr, weight_decay=weight_decay
        )
        return *fmuon.apply_updates(own, updates).values(), new["momentum"]["w"]

    inputs = [torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64)]
    inputs += [*params.values(), *(torch.randn_like(p) for p in params.values())]
    inputs += [state["momentum"]["w"]]
    assert torch.autograd.gradcheck(updated, [t.clone().requires_grad_() for t in inputs])


def test_the_learning_rate_can_be_learned_through_an_update():
    opt = fmuon.muon(differentiable=True)
    params = {"w": torch.randn(3, 4)}
    grads, state = {"w": torch.randn(3, 4)}, opt.init(params)

    def loss(lr):
        updates, _ = opt.update(grads, state, 0, lr=lr)
        return fmuon.apply_updates(params, updates)["w"].square().sum()

    slope = torch.func.grad(loss)(torch.tensor(0.1))
    lr = torch.tensor(0.1, requires_grad=True)
    loss(lr).backward()
    numeric = (loss(torch.tensor(0.101)) - loss(torch.tensor(0.099))) / 0.002
    assert_close(slope, numeric, rtol=1e-2, atol=1e-2)
    assert_close(slope, lr.grad)


# ---- laws ----------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**31))
def test_an_update_is_odd_in_the_gradient(rows, columns, seed):
    grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    labels = {"w": "muon"}
    positive = one_step({"w": grad}, {"w": grad}, labels=labels)["w"]
    assert torch.equal(one_step({"w": grad}, {"w": -grad}, labels=labels)["w"], -positive)


# ---- errors --------------------------------------------------------------------------------------


def message(error, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_errors_of_options():
    def text(**options):
        return message(fmuon.ConfigurationError, fmuon.muon, **options)

    assert_expected_inline(text(lr=-0.1), """lr=-0.1: must be finite and not negative""")
    assert_expected_inline(text(lr=float("nan")), """lr=nan: must be finite and not negative""")
    assert_expected_inline(text(momentum=1.0), """momentum=1.0: must be in [0, 1)""")
    assert_expected_inline(text(momentum=-1), """momentum=-1: must be in [0, 1)""")
    assert_expected_inline(
        text(lr=torch.ones(2)),
        """lr: a tensor of shape (2,) and dtype torch.float32; a real 0-d tensor is needed""",
    )
    assert_expected_inline(
        text(lr="fast"),
        """lr='fast': give a number, a 0-d tensor, a callable of the step, or a dict path -> one of these""",
    )
    assert_expected_inline(
        text(scale="orignal"),
        """unknown scale 'orignal'; known: 'original', 'match_rms_adamw', 'spectral', 'none'; did you mean 'original'?""",
    )
    assert_expected_inline(
        text(missing="ignore"), """missing='ignore'; known: 'skip', 'zero', 'error'"""
    )
    assert_expected_inline(
        text(auxiliary={}),
        """auxiliary: []; give a rule, or a dict name -> rule with one entry at least and none of the names ['error', 'frozen', 'mantissa', 'momentum', 'momentum_scale', 'muon', 'second_moment']""",
    )
    assert_expected_inline(
        message(fmuon.ConfigurationError, fmuon.adamw, betas=(0.9, 1.0)),
        """adamw: betas=(0.9, 1.0) must be two numbers in [0, 1)""",
    )


def test_errors_of_params():
    def text(**params):
        return message(fmuon.LeafError, fmuon.init, params)

    w = torch.randn(3, 4)
    assert_expected_inline(
        text(b=torch.randn(3)),
        """no leaf was assigned to Muon (1 auxiliary, 0 frozen); pass the matrices of the model, or label every leaf if this is meant; print(fmuon.explain(model)) shows why each leaf got what it has""",
    )
    assert_expected_inline(
        text(w=w, z=w.to(torch.complex64)),
        """'z': complex parameter (torch.complex64); train torch.view_as_real of it, or label it 'frozen'""",
    )
    assert_expected_inline(
        text(w=w, z=w.to_sparse()), """'z': sparse parameter (torch.sparse_coo); make it dense"""
    )
    assert_expected_inline(
        text(w=w, z=torch.arange(3)),
        """'z': dtype torch.int64; floating point needed, or label it 'frozen'""",
    )
    assert_expected_inline(
        text(w=w, z=3.0),
        """params: leaf 'z' is a float; a leaf is a tensor, or None for one that doesn't move""",
    )


def test_errors_of_updates_name_the_leaf():
    params = {"w": torch.randn(3, 4), "b": torch.randn(3)}
    state = fmuon.init(params)

    def text(error, grads, *args, opt=fmuon.muon(), **scalars):
        return message(error, opt.update, grads, state, 0, *args, **scalars)

    assert_expected_inline(
        text(fmuon.StateError, {"w": params["w"], "c": params["b"]}),
        """grads and state don't name the same leaves; missing from grads: ['b']; unknown to the state: ['c']; pass None for a leaf without a gradient, and make the state with init(params) of the same leaves""",
    )
    assert_expected_inline(
        text(fmuon.LeafError, {"w": params["w"].T, "b": params["b"]}),
        """'w': gradient of shape (4, 3) on cpu, state of shape (3, 4) on cpu; the two must be equal (init(params) makes a new state)""",
    )
    assert_expected_inline(
        text(fmuon.LeafError, {"w": params["w"].to_sparse(), "b": params["b"]}),
        """'w': sparse gradient (torch.sparse_coo); make it dense with .to_dense(), or build the layer with sparse=False""",
    )
    assert_expected_inline(
        text(fmuon.ConfigurationError, params, weight_decay=torch.tensor(0.0)),
        """weight decay needs the params: call update(grads, state, step, params), or set weight_decay=0""",
    )
    assert_expected_inline(
        text(fmuon.LeafError, params, {"w": params["w"]}, weight_decay=0.1),
        """params: missing the leaves ['b'], which the state has""",
    )
    assert_expected_inline(
        text(fmuon.LeafError, params, lr={"W": 0.1}),
        """lr: 'W' is no leaf of the state""",
    )
    assert_expected_inline(
        text(fmuon.ConfigurationError, params, lr={"w": -1}),
        """lr['w']=-1: must be finite and not negative""",
    )
    assert_expected_inline(
        text(fmuon.ConfigurationError, params, betas=(0.9, 2)), """beta2=2: must be in [0, 1)"""
    )
    assert_expected_inline(
        text(fmuon.StateError, params, opt=fmuon.muon(labels={"w": "auxiliary"})),
        """'w': labels['w'] says 'auxiliary', but the state holds 'momentum' for it; use the opt that made this state""",
    )
    assert_expected_inline(
        text(fmuon.StateError, params, opt=fmuon.muon(labels={"re:.*": fmuon.Matrix(0, 0)}))[:40],
        """'b': labels['re:.*'] says Matrix(fan_out""",
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state["auxiliary"]["nu"].pop("b"),
        lambda state: state["momentum"].pop("w"),
        lambda state: state["momentum"].update(x=torch.zeros(2, 2)),
        lambda state: state["auxiliary"].pop("nu"),
        lambda state: state["auxiliary"]["mu"].update(b=torch.zeros(1)),
        lambda state: state["momentum"].update(w=torch.zeros(3, 4, dtype=torch.int32)),
        lambda state: state["missed"].update(w=torch.zeros(2)),
        lambda state: state.pop("missed"),
    ],
)
def test_a_damaged_state_is_refused_before_anything_is_written(damage):
    opt = fmuon.muon(0.1)
    params = {"w": torch.randn(3, 4), "b": torch.randn(3)}
    state = opt.init(params)
    damage(state)
    before = clone((params, state))
    with pytest.raises(fmuon.FMuonError, match=r"'[wbx]'|no state of fmuon"):
        fmuon.update_(opt, params, params, state, 0)
    assert_same_bits((params, state), before)


@pytest.mark.parametrize(
    "scalars",
    [
        {"present": {"b": False}},
        {"present": {"b": torch.ones(1)}},
        {"lr": lambda step: None},
        {"betas": 0.9},
        {"betas": (0.9, 0.9, 0.9)},
        {"betas": {"b": (0.9,)}},
        {"lr": torch.tensor(1j)},
        {"eps": {"b": lambda step: "x"}},
    ],
)
def test_a_bad_scalar_is_refused_before_anything_is_written(scalars):
    opt = fmuon.muon(0.1)
    params = {"w": torch.randn(3, 4), "b": torch.randn(3)}
    state = opt.init(params)
    before = clone((params, state))
    with pytest.raises(fmuon.FMuonError):
        fmuon.update_(opt, params, params, state, 0, **scalars)
    assert_same_bits((params, state), before)


def test_an_expanded_param_cannot_be_written():
    params = {"w": torch.randn(3, 4), "v": torch.randn(1, 4).expand(3, 4)}
    opt = fmuon.muon(0.1)
    before = clone(params)
    with pytest.raises(fmuon.LeafError, match="'v': an expanded tensor"):
        fmuon.update_(opt, params, clone(params), opt.init(params), 0)
    assert_same_bits(params, before)


@pytest.mark.parametrize("here", [True, False])
def test_a_leaf_without_a_gradient_sits_out_once_whatever_its_flag_says(here):
    params = {"w": torch.randn(3, 4), "v": torch.randn(3, 4)}
    opt = fmuon.muon(0.1)
    state, present = opt.init(params), {"w": torch.tensor(here)}
    _, new = opt.update({"w": None, "v": params["v"]}, state, 0, present=present)
    assert new["missed"]["w"] == 1
    fmuon.update_(opt, params, {"w": None, "v": clone(params["v"])}, state, 0, present=present)
    assert state["missed"]["w"] == 1


def test_autocast_around_a_step_leaves_the_dtype_of_the_iteration_alone():
    params = {"w": torch.randn(16, 24)}
    expected = one_step(params, params)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(one_step(params, params), expected)


def test_a_large_stack_of_one_leaf_is_orthogonalised_in_parts():
    shapes = []

    def recording(x):
        shapes.append(tuple(x.shape))
        return x

    grad = {"experts": torch.randn(64, 8, 6)}
    options = {"labels": {"experts": fmuon.Matrix(1, 2)}}
    opt = fmuon.muon(orthogonalize=recording, max_stack_bytes=4 * 8 * 6 * 4, **options)
    opt.update(grad, opt.init(grad), 0)
    assert shapes == [(4, 6, 8)] * 16


def test_an_unused_unit_does_not_make_meta_gradients_nan():
    opt = fmuon.muon(differentiable=True)
    params = {"w": torch.randn(3, 4), "b": torch.zeros(3)}
    grad = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    updates, _ = opt.update({"w": params["w"], "b": grad}, opt.init(params), 0)
    (slope,) = torch.autograd.grad(updates["b"].sum(), grad)
    assert slope.isfinite().all()


def test_a_frozen_leaf_may_have_a_gradient_and_has_no_state():
    params = {"w": torch.randn(3, 4), "f": torch.randn(3, 4)}
    opt = fmuon.muon(labels={"f": "frozen"})
    state = opt.init(params)
    assert set(state["missed"]) == {"w"}
    updates, _ = opt.update(params, state, 0)
    assert updates["f"] is None


def test_a_state_of_undeclared_views_is_refused():
    params = {"c": torch.randn(4, 3, 2, 2), "w": torch.randn(3, 4)}
    opt = fmuon.muon(labels={"c": fmuon.Matrix(0, (1, 2, 3))})
    assert_expected_inline(
        message(fmuon.StateError, fmuon.update, params, opt.init(params), 0),
        """'c': the state has a momentum of shape (4, 3, 2, 2), for which this opt declares no matrix view; use the opt that made this state""",
    )
    assert_expected_inline(
        message(fmuon.StateError, fmuon.update, params, {"mu": {}}, 0),
        """no state of fmuon for this opt: it has the keys ['mu'] and lacks ['auxiliary', 'missed', 'momentum']; make it with init""",
    )
    assert_expected_inline(
        message(fmuon.StateError, fmuon.apply_updates, {"w": params["w"]}, {"v": params["w"]}),
        """updates: ['v'] are no leaves of params; pass the params of the update""",
    )


# ---- variants ------------------------------------------------------------------------------------


def test_adaptive_multiplies_a_leaf_by_its_dual_norm():
    method = fmuon.NewtonSchulz(dtype="float64")
    shapes = {"w": (4, 6), "t": (6, 4), "x": (3, 4, 6), "b": (5, 6)}
    grads = {k: torch.randn(s, dtype=torch.float64) for k, s in shapes.items()}
    labels = {"x": fmuon.Matrix(1, 2), "b": fmuon.Matrix(blocks=(2, 3))}
    opts = [
        fmuon.muon(1.0, orthogonalize=method, scale="none", adaptive=adaptive,
                   labels=labels | {"re:.*": "muon"})
        for adaptive in (False, True)
    ]  # fmt: skip
    plain, adaptive = (opt.update(grads, opt.init(grads), 0)[0] for opt in opts)
    for k, factor in plain.items():
        # Of a first step: b (1 - b) G / (1 - b^2) + (1 - b) G / (1 - b); updates are -O.
        look = grads[k] * (0.95 * 0.05 / (1 - 0.95**2) + 1)
        assert_close(adaptive[k], factor * -(look * factor).sum(), rtol=1e-9, atol=1e-9)


def test_cautious_decay_spares_what_the_update_pushes_away_from_zero():
    params = {"w": torch.randn(5, 7), "v": torch.randn(6)}
    grads = {k: torch.randn_like(p) for k, p in params.items()}
    bare = one_step(params, grads)
    opt = fmuon.muon(0.1, orthogonalize=EXACT, weight_decay=0.5, decay="cautious")
    cautious, _ = opt.update(grads, opt.init(params), 0, params)
    for k, p in params.items():
        # An update of the sign of -W shrinks W.
        shrinks = bare[k] * p <= 0
        assert 0 < shrinks.sum() < p.numel()
        assert_close(cautious[k], bare[k] - torch.where(shrinks, 0.05 * p, 0))


def test_momentum_in_bfloat16_is_rounded_when_it_is_stored():
    params = {"w": torch.randn(4, 6), "v": torch.randn(3)}
    grads = {k: torch.randn_like(p) for k, p in params.items()}
    opt = fmuon.muon(momentum_dtype=torch.bfloat16, auxiliary=fmuon.adamw(mu_dtype=torch.bfloat16))
    state = opt.init(params)
    updates, after = opt.update(grads, state, 0)
    plain, expected = fmuon.update(grads, fmuon.init(params), 0)
    assert_close(updates, plain, rtol=0, atol=0)
    for ours, full in (
        (after["momentum"]["w"], expected["momentum"]["w"]),
        (after["auxiliary"]["mu"]["v"], expected["auxiliary"]["mu"]["v"]),
    ):
        assert_same_bits(ours, full.to(torch.bfloat16))
    assert after["auxiliary"]["nu"]["v"].dtype == torch.float32
    own = {k: p.clone() for k, p in params.items()}
    fmuon.update_(opt, own, grads, state, 0)
    assert_close(state, after, rtol=0, atol=0)


def test_a_rule_may_have_a_learning_rate_of_its_own():
    params = {"w": torch.randn(4, 6), "v": torch.randn(3)}
    own = fmuon.muon(1.0, auxiliary=fmuon.adamw(lr=lambda step: 0.25 * (step + 1)))
    scaled = fmuon.muon(1.0, auxiliary=fmuon.adamw(lr_scale=0.5))
    state = own.init(params)
    updates, _ = own.update(params, state, 1)
    expected, _ = scaled.update(params, state, 1)
    assert_close(updates, expected)
    # A rate for all is that of the matrices, one for a leaf is the leaf's.
    updates, _ = own.update(params, state, 1, lr=2.0)
    assert_close(updates["v"], expected["v"])
    assert_close(updates["w"], 2 * expected["w"])
    updates, _ = own.update(params, state, 1, lr={"v": 1.0})
    assert_close(updates["v"], 2 * expected["v"])


def test_eps_root_is_under_the_root():
    params = {"w": torch.randn(4, 6), "v": torch.randn(3, dtype=torch.float64)}
    opt = fmuon.muon(1.0, auxiliary=fmuon.adamw(eps=1e-3, eps_root=1e-2))
    updates, _ = opt.update(params, opt.init(params), 0)
    g = params["v"]
    assert_close(updates["v"], -g / ((g**2 + 1e-2).sqrt() + 1e-3))


def test_a_mask_leaves_the_decay_of_a_rule_alone():
    params = {"w": torch.randn(4, 6), "v": torch.randn(3)}
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    opt = fmuon.muon(
        1.0, weight_decay=lambda path, leaf: 0.5, auxiliary=fmuon.adamw(weight_decay=0)
    )
    updates, _ = opt.update(zeros, opt.init(params), 0, params)
    assert not updates["v"].any()
    assert_close(updates["w"], -0.5 * params["w"])
    updates, _ = opt.update(zeros, opt.init(params), 0, params, weight_decay={"v": 0.1})
    assert_close(updates["v"], -0.1 * params["v"])


def test_a_view_may_have_a_scale_of_its_own():
    params = {"a": torch.randn(4, 6), "b": torch.randn(4, 6)}
    updates = one_step(
        params, {"a": params["a"], "b": params["a"]}, labels={"b": fmuon.Matrix(scale=3.0)},
        scale="none",
    )  # fmt: skip
    assert_close(updates["b"], 3 * updates["a"])


def test_float64_leaves_are_computed_in_float64_whatever_their_momentum():
    params = {"w": torch.randn(4, 6, dtype=torch.float64)}
    opt = fmuon.muon(momentum_dtype=torch.bfloat16)
    updates, state = opt.update(params, opt.init(params), 0)
    assert updates["w"].dtype == torch.float64 and state["momentum"]["w"].dtype == torch.bfloat16


def test_eps_may_come_before_the_bias_correction():
    opt = fmuon.muon(0.1, auxiliary=fmuon.adamw(eps=0.5, eps_first=True), labels={"b": "auxiliary"})
    params = {"b": torch.zeros(5, dtype=torch.float64)}
    state, m, v = opt.init(params), 0.0, 0.0
    for t in range(1, 6):
        grad = torch.randn(5, dtype=torch.float64)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        expected = -0.1 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (v.sqrt() + 0.5)
        updates, state = opt.update({"b": grad}, state, t - 1)
        assert_close(updates["b"], expected, **DOUBLE)
