# SPDX-License-Identifier: Apache-2.0
"""Presets against formulas; tests/parity compares them with the optimizers themselves."""

import copy
import dataclasses
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import references
import torch
from expecttest import assert_expected_inline
from strategies import refusal
from torch import nn
from torch.testing import assert_close

import fmuon
from fmuon.presets import PRESETS

# ---- a function around muon-optimizer, made to equal optax ---------------------------------------


class TwoBranches(nn.Module):
    """Linear layers, bare kernels stored (in, out), and two heads of which one is used at a time."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 14)
        self.proj_kernel = nn.Parameter(torch.randn(14, 5) / 4)
        self.encoder = nn.Linear(5, 7, bias=False)
        self.unembed_kernel = nn.Parameter(torch.randn(5, 20) / 4)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, tokens, step):
        hidden = torch.tanh(self.up(self.embedding(tokens))) @ self.proj_kernel
        return (self.encoder(hidden) if step % 2 else hidden @ self.unembed_kernel).square().mean()


def aux_adam_step(model, state, linear, t, lr):
    """Line by line: a missing gradient is zero, matrices by Muon, the rest by Adam with Nesterov."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if p.ndim == 2:
            b = 0.95
            m = state[name] = b * state.get(name, 0) + (1 - b) * grad.double()
            u = b * m / (1 - b ** (t + 1)) + (1 - b) * grad.double() / (1 - b**t)
            x = u.T if u.shape[0] > u.shape[1] else u
            x = x / (x.norm() + 1e-8)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            o = x.T if u.shape[0] > u.shape[1] else x
            fan_out, fan_in = p.shape if name in linear else p.shape[::-1]
            p.data.sub_(lr * math.sqrt(max(1, fan_out / fan_in)) * o)
        else:
            m, v = state.get(name, (0, 0))
            w, m, v = references.adamw_step(
                p.data.double(), grad.double(), m, v, t, lr=lr, betas=(0.9, 0.999), eps=1e-8,
                weight_decay=0.0, nesterov=True,
            )  # fmt: skip
            state[name] = m, v
            p.data.copy_(w)


def test_one_line_replaces_the_function_around_muon_optimizer():
    models = [TwoBranches() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer = fmuon.FMuon(models[0], preset="muon_with_aux_adam", lr=0.02)
    state, tokens = {}, torch.randint(0, 11, (20, 8))
    for step in range(20):
        for model in models:
            model.zero_grad()
            model(tokens[step], step).backward()
        unused = models[0].unembed_kernel if step % 2 else models[0].encoder.weight
        assert unused.grad is None
        optimizer.step()
        aux_adam_step(models[1], state, {"up.weight", "encoder.weight"}, step + 1, lr=0.02)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert sum("momentum_buffer" in kept for kept in optimizer.state.values()) == 5


def test_without_a_module_the_layouts_are_unknown():
    assert_expected_inline(
        refusal(fmuon.ConfigurationError, fmuon.presets.muon_with_aux_adam, 0.02),
        """\
muon_with_aux_adam: weights of nn.Linear are told from other matrices by their
module; give the model: FMuon(model, preset=...), or
presets.muon_with_aux_adam(lr, params=model)""",
    )


# ---- KellerJordan's older form -------------------------------------------------------------------


def older_step(w, grad, m, lr=0.02, decay=0.01, b=0.95):
    """Decay, then the scaled factor of the look-ahead; a convolution is flattened to be one matrix.

    Its scale is that of the raw last two axes.
    """
    m = b * m + (1 - b) * grad
    u = b * m + (1 - b) * grad
    flat = u.reshape(len(u), -1) if u.ndim == 4 else u
    matrices = flat if flat.ndim == 3 else flat[None]
    o = torch.stack([_factor(x) for x in matrices]).reshape(w.shape)
    rows, columns = w.shape[-2:]
    return w * (1 - lr * decay) - lr * math.sqrt(max(1, rows / columns)) * o, m


def _factor(x):
    wide = x if x.shape[0] <= x.shape[1] else x.T
    o = references.newton_schulz(wide)
    return o if x.shape[0] <= x.shape[1] else o.T


def test_jordan_is_the_older_form_for_matrices_convolutions_and_stacks():
    method = fmuon.NewtonSchulz(dtype="float64", eps=0.0, norm="add")
    opt = fmuon.presets.jordan(weight_decay=0.01, orthogonalize=method)
    shapes = {"w": (6, 4), "conv": (6, 4, 3, 2), "experts": (3, 5, 4), "wide": (4, 9)}
    params = {k: torch.randn(s, dtype=torch.float64) for k, s in shapes.items()}
    expected, moments = dict(params), dict.fromkeys(params, 0)
    state = opt.init(params)
    for step in range(20):
        grads = {k: torch.randn_like(p) for k, p in params.items()}
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        for k, grad in grads.items():
            expected[k], moments[k] = older_step(expected[k], grad, moments[k])
    assert_close(params, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("preset", ["jordan", "normuon", "dion"])
def test_the_flag_of_a_group_and_the_view_of_the_preset_go_together(preset):
    conv, bias = nn.Parameter(torch.randn(6, 4, 3, 2)), nn.Parameter(torch.randn(3))
    groups = [{"params": [conv], "use_muon": True}, {"params": [bias], "use_muon": False}]
    optimizer = fmuon.FMuon(groups, preset=preset)
    conv.grad, bias.grad = torch.randn_like(conv), torch.randn_like(bias)
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[conv]
    assert "exp_avg" in optimizer.state[bias]


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_gives_options_of_muon_and_may_be_overruled(name):
    model = nn.Linear(4, 3)
    preset = PRESETS[name]
    assert getattr(fmuon.presets, name) is preset and preset.source
    opt = preset(0.5, params=model, scale="none", momentum_dtype=torch.bfloat16)
    config = opt.update.__self__
    assert (config.lr, config.momentum_dtype, config.scale(4, 2)) == (0.5, torch.bfloat16, 1)
    assert preset.row.__doc__ and preset.__doc__ == preset.row.__doc__
    assert "lr" in inspect.signature(preset).parameters


@pytest.mark.parametrize("name", PRESETS)
def test_fmuon_reads_the_same_row(name):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    opt = PRESETS[name](0.01, params=model)
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    optimizer = fmuon.FMuon(model, lr=0.01, preset=name)
    state = opt.init(params)
    for step in range(3):
        grads = {k: torch.randn_like(p) for k, p in params.items()}
        for k, p in model.named_parameters():
            p.grad = grads[k]
        optimizer.step()
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
    for k, p in model.named_parameters():
        assert_close(p.detach(), params[k], rtol=1e-5, atol=1e-6)


def test_errors_name_the_argument():
    presets = fmuon.presets
    assert_expected_inline(
        "\n".join(
            refusal(fmuon.FMuonError, function)
            for function in (
                lambda: presets.optax(0.1, ns_coeffs="keller"),
                lambda: presets.optax(0.1, ns_coeffs=((1.0, 2.0, 3.0),) * 4, ns_steps=3),
                lambda: presets.optax(0.1, ns_coeffs=(1.0, 2.0)),
                lambda: presets.optax(0.1, preconditioning="svd"),
                lambda: presets.torch(adjust_lr_fn="rms"),
                lambda: presets.dion(adjust_lr="rms"),
                lambda: presets.normuon(axis="columns"),
                lambda: presets.jordan(0.1, adam_betas=(1.0, 0.9)),
                lambda: presets.optax(0.1, weight_decay=1.0, weight_decay_mask={"a": True}).update(
                    *_single("w")
                ),
            )
        ),
        """\
unknown ns_coeffs 'keller'; known: 'standard', 'dion'
ns_coeffs: 4 rows, more than ns_steps=3
ns_coeffs: (1.0, 2.0); every row has three numbers
preset 'optax' with lr=0.1, preconditioning='svd': unknown normalization 'svd';
known: 'frobenius', 'spectral', 'schatten', 'aol'
unknown adjust_lr_fn 'rms'; known: 'original', 'match_rms_adamw',
'spectral_unclamped'
unknown adjust_lr 'rms'; known: 'spectral_norm', 'rms_norm', 'none'
NorMuon: axis='columns'; known: 'rows', 'long'
preset 'jordan' with lr=0.1, adam_betas=(1.0, 0.9): adamw: betas=(1.0, 0.9) must
be two numbers in [0, 1)
'w': the tree {'a': True} has no value for this leaf""",
    )


def _single(name):
    params = {name: torch.randn(3, 3)}
    return params, fmuon.presets.optax().init(params), 0, params


# ---- trees of optax ------------------------------------------------------------------------------


def numbers(reduction_axis=0, output_axis=1):
    return SimpleNamespace(reduction_axis=reduction_axis, output_axis=output_axis)


def test_dimension_numbers_may_be_a_tree_a_prefix_or_a_function():
    params = {"block": [torch.randn(4, 6), torch.randn(2, 4, 6)], "bias": torch.randn(4)}
    tree = {"block": [numbers(), numbers(1, 2)], "bias": None}
    prefix = {"block": numbers(-2, -1), "bias": None}
    by_leaf = lambda path, leaf: numbers(-2, -1) if leaf.ndim > 1 else None  # noqa: E731
    updates = []
    for given in (tree, prefix, by_leaf):
        opt = fmuon.presets.optax(0.1, muon_weight_dimension_numbers=given)
        updates.append(opt.update(params, opt.init(params), 0)[0])
    assert_close(updates[0], updates[1], rtol=0, atol=0)
    assert_close(updates[0], updates[2], rtol=0, atol=0)
    single = fmuon.presets.optax(0.1, muon_weight_dimension_numbers=numbers(-2, -1))
    config = single.update.__self__
    view = config.assign({"w": torch.randn(5, 4, 6)})["w"].label.view("w", (5, 4, 6))
    assert (view.count, view.fan_out, view.fan_in) == (5, 6, 4)


def test_a_mask_reaches_the_matrices_only():
    params = {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "bias": torch.randn(4)}
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    opt = fmuon.presets.optax(1.0, weight_decay=0.1, weight_decay_mask={"a": True, "b": False})
    with pytest.raises(fmuon.ConfigurationError, match="'bias'"):
        opt.update(zeros, opt.init(params), 0, params)
    mask = {"a": True, "b": False, "bias": True}
    opt = fmuon.presets.optax(1.0, weight_decay=0.1, weight_decay_mask=mask)
    updates, _ = opt.update(zeros, opt.init(params), 0, params)
    assert_close(updates["a"], -0.1 * params["a"])
    assert not updates["b"].any() and not updates["bias"].any()


def test_a_square_kernel_is_scaled_by_its_rows_as_optax_stores_it():
    opt = fmuon.presets.optax(0.1, preconditioning="aol")
    label = opt.update.__self__.assign({"w": torch.randn(4, 4), "v": torch.randn(4, 5)})
    assert (label["w"].label, label["v"].label) == (fmuon.Matrix(0, 1), fmuon.Matrix(1, 0))


def test_presets_are_equal_when_their_values_are():
    first, second = fmuon.presets.jordan(0.1), fmuon.presets.jordan(0.1)
    assert first.update.__self__ == second.update.__self__
    assert dataclasses.is_dataclass(fmuon.presets.jordan)


@pytest.mark.parametrize("preset", [None, "jordan", "normuon"])
def test_the_learning_rate_that_a_group_says_is_meant_as_it_stands(preset):
    p = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
    groups = [
        {"params": p[:1], "use_muon": True, "lr": 0.05},
        {"params": p[1:], "use_muon": False, "lr": 1e-3},
    ]
    options = {} if preset else {"auxiliary": fmuon.adamw(lr_scale=0.1)}
    optimizer = fmuon.FMuon(groups, preset=preset, **options)
    assert [group["lr_scale"] for group in optimizer.param_groups] == [1, 1]
    for q in p:
        q.grad = torch.ones_like(q)
    optimizer.step()
    # The first step of Adam has the size of the learning rate.
    assert_close(1 - p[1], torch.full((4,), 1e-3), rtol=1e-4, atol=0)


def test_foreign_arguments_are_answered_with_the_rows_own():
    model = nn.Linear(3, 3)
    assert_expected_inline(
        "\n".join(
            refusal(fmuon.FMuonError, function)
            for function in (
                lambda: fmuon.presets.optax(0.1, weight_decay_mask=lambda params: params),
                lambda: fmuon.presets.moonlight(0.1, n_steps=5),
                lambda: fmuon.FMuon(model, preset="torch", ns_step=5),
                lambda: fmuon.explain(model, torch.optim.SGD(model.parameters())),
            )
        ),
        """\
weight_decay_mask or muon_weight_dimension_numbers: a callable of the whole
tree, as optax takes it; give one of a leaf, (path, tensor) -> value, or the
tree itself
preset 'moonlight' has no argument 'n_steps'; did you mean 'ns_steps'?; its own
are adamw_betas, adamw_eps, lr, momentum, nesterov, ns_steps, wd, and those of
fmuon.muon
preset 'torch' has no argument 'ns_step'; did you mean 'ns_steps'?; its own are
adjust_lr_fn, eps, lr, momentum, nesterov, ns_coefficients, ns_steps,
weight_decay, and those of fmuon.muon
a SGD that was not made by fmuon.muon or a preset; give what they return, or an
FMuon""",
    )


def test_optax_takes_coefficients_as_arrays_and_keeps_blocks_of_squares():
    for coeffs in (np.array([2.0, -1.5, 0.5]), np.array([[2.0, -1.5, 0.5]] * 5)):
        assert fmuon.presets.optax(ns_coeffs=coeffs)
    with pytest.raises(fmuon.ConfigurationError, match="ns_steps=3"):
        fmuon.presets.optax(ns_coeffs="dion", ns_steps=3)
    view = fmuon.Matrix(0, 1, blocks=(1, 3), scale=5.0)
    opt = fmuon.presets.optax(preconditioning="aol", muon_weight_dimension_numbers={"w": view})
    label = opt.update.__self__.assign({"w": torch.randn(4, 4)})["w"].label
    assert label == fmuon.Matrix(1, 0, blocks_in=(1, 3), scale=5.0)


def test_a_copied_optimizer_keeps_the_views_of_its_preset():
    optimizer = copy.deepcopy(fmuon.FMuon(nn.Linear(4, 6), preset="optax"))
    group = {"params": [("w", nn.Parameter(torch.zeros(4, 8)))], "use_muon": True}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[-1]["rules"][0]["fan_out"] == 1
