# SPDX-License-Identifier: Apache-2.0
"""The real peers in the same process."""

import pytest
import references
import torch
from torch import nn
from torch.testing import assert_close

import fmuon

SHAPES = [(8, 24), (24, 8), (16, 16), (1, 12)]


def peer_and_params(**options):
    leaves = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    params = {f"w{i}": leaf.detach().clone() for i, leaf in enumerate(leaves)}
    return torch.optim.Muon(leaves, lr=0.02, weight_decay=0.1, **options), leaves, params


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_equals_torch_optim_muon_for_20_steps(nesterov, scale):
    peer, leaves, params = peer_and_params(nesterov=nesterov, adjust_lr_fn=scale)
    opt = fmuon.muon(
        0.02, nesterov=nesterov, bias_correction=False, weight_decay=0.1, scale=scale,
        orthogonalize=fmuon.NewtonSchulz(dtype="bfloat16", norm="clamp"),
        labels={"re:.*": "muon"},
    )  # fmt: skip
    start, state = dict(params), opt.init(params)
    for step in range(20):
        grads = {k: torch.randn_like(p) for k, p in params.items()}
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = grad.clone()
        peer.step()
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
    for (k, ours), theirs in zip(params.items(), leaves, strict=True):
        # It takes the norm in bfloat16 and we in float32: a first factor 2^-9 apart, amplified at
        # most by the slopes of five steps near the top of the spectrum, averages out over steps.
        moved = (theirs.detach() - start[k]).norm()
        assert (ours - theirs.detach()).norm() < 2e-2 * moved
    assert_close(
        list(state["momentum"].values()),
        [peer.state[leaf]["momentum_buffer"] for leaf in leaves],
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("preset", ["optax", "jordan"])
def test_presets_follow_their_formulas(preset):
    make = getattr(fmuon.presets, preset)
    over = {"orthogonalize": fmuon.NewtonSchulz(dtype="float32", eps=0.0, norm="add")}
    opt = make(0.02, **over)
    params = {"w": torch.randn(12, 5), "b": torch.randn(5)}
    w, m = params["w"].double(), torch.zeros(12, 5, dtype=torch.float64)
    b, mu, nu = params["b"].double(), 0.0, 0.0
    state = opt.init(params)
    for step in range(20):
        grads = {k: torch.randn_like(p) for k, p in params.items()}
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        optax = preset == "optax"
        # optax reads a kernel as (in, out).
        turn = (lambda x: x.T) if optax else (lambda x: x)
        w, m = references.muon_step(
            turn(w), turn(grads["w"]), turn(m), step + 1, lr=0.02, b=0.95, nesterov=True,
            bias_correction=optax, weight_decay=0.0, scale="original",
        )  # fmt: skip
        w, m = turn(w), turn(m)
        b, mu, nu = references.adamw_step(
            b, grads["b"].double(), mu, nu, step + 1, lr=0.02 if optax else 3e-4,
            betas=(0.9, 0.999) if optax else (0.9, 0.95), eps=1e-8 if optax else 1e-10,
            weight_decay=0.0, nesterov=optax,
        )  # fmt: skip
    assert_close(params["w"].double(), w, rtol=1e-4, atol=2e-5)
    assert_close(params["b"].double(), b, rtol=1e-5, atol=1e-6)


def test_over_replaces_the_values_of_a_row():
    params = {"w": torch.randn(4, 4)}
    opt = fmuon.presets.jordan(0.1, scale="none", missing="skip")
    updates, _ = opt.update({"w": None}, opt.init(params), 0)
    assert updates["w"] is None
