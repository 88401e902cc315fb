# SPDX-License-Identifier: Apache-2.0
"""The schedulers of torch drive FMuon as they drive AdamW, whose groups are the reference."""

import copy
import io
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR
from torch.testing import assert_close

import fmuon

STEPS = 13

SCHEDULERS = {
    "LambdaLR": lambda o: s.LambdaLR(o, lambda i: 0.9**i),
    "LambdaLR of two": lambda o: s.LambdaLR(o, [lambda i: 1 / (1 + i), lambda i: 0.7**i]),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda i: 0.95 - 0.01 * i),
    "StepLR": lambda o: s.StepLR(o, 4, gamma=0.5),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [2, 7], gamma=0.3),
    "ConstantLR": lambda o: s.ConstantLR(o, factor=0.25, total_iters=5),
    "LinearLR": lambda o: s.LinearLR(o, 0.1, 1.0, total_iters=8),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: s.PolynomialLR(o, total_iters=10, power=2.0),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 9, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "SequentialLR": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, total_iters=4), s.CosineAnnealingLR(o, 8)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: s.ChainedScheduler(
        [s.ConstantLR(o, 0.5, total_iters=3), s.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: s.CyclicLR(o, 0.01, [0.1, 0.3], step_size_up=4),
    "OneCycleLR": lambda o: s.OneCycleLR(o, [0.1, 0.3], total_steps=STEPS + 1),
    "SWALR": lambda o: SWALR(o, [0.001, 0.1], anneal_epochs=6),
}
CYCLED = {"CyclicLR", "OneCycleLR"}  # these write betas too


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 6, bias=False)


class Written(NamedTuple):
    """What a scheduler has written into one group when a step begins."""

    lr: float
    betas: tuple[float, float]


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def groups(model, kind=float, lrs=(0.01, 0.02)):
    """The matrices and the rest, each with a rate of its own; AdamW takes the same groups."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if (p.ndim > 1) == use_muon], "use_muon": use_muon}
        | {"lr": kind(lr)}
        for lr, use_muon in zip(lrs, (True, False), strict=True)
    ]


def advance(scheduler):
    # A loss that never improves.
    scheduler.step(*[1.0] * isinstance(scheduler, s.ReduceLROnPlateau))


def drive(model, optimizer, scheduler, start=0, stop=STEPS):
    """Train with fixed gradients; per step, what the scheduler had written into every group."""
    curve = []
    for seed in range(start, stop):
        curve.append([Written(float(g["lr"]), tuple(g["betas"])) for g in optimizer.param_groups])
        gradients(model, seed)
        optimizer.step()
        advance(scheduler)
    return curve


def replay(params, curve, group_of, weight_decay=0.1, **options):
    """The weights that the functional core arrives at under a recorded curve."""
    opt = fmuon.muon(weight_decay=weight_decay, **options)
    state = opt.init(params)
    model = Model()
    for step, written in enumerate(curve):
        gradients(model, step)
        updates, state = opt.update(
            {name: p.grad for name, p in model.named_parameters()},
            state,
            step,
            params,
            lr={name: written[group_of[name]].lr for name in params},
            betas={name: written[group_of[name]].betas for name in params},
        )
        params = fmuon.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_groups_and_weights_follow_the_curve_of_adamw(name, kind):
    model, peer_model = Model(), Model()
    peer = torch.optim.AdamW(groups(peer_model, kind))
    peer_scheduler = SCHEDULERS[name](peer)
    before = weights(model)
    optimizer = fmuon.FMuon(groups(model, kind), weight_decay=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    expected = drive(peer_model, peer, peer_scheduler)
    assert drive(model, optimizer, scheduler) == expected
    assert scheduler.get_last_lr() == peer_scheduler.get_last_lr()
    assert len({lr for (lr, _), _ in expected}) > 1
    assert (len({betas for (_, betas), _ in expected}) > 1) == (name in CYCLED)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.95, 0.95]
    if kind is torch.tensor:
        assert all(g["lr"] is r for g, r in zip(optimizer.param_groups, rates, strict=True))
        floats = torch.optim.AdamW(groups(peer_model))
        curves = expected, drive(peer_model, floats, SCHEDULERS[name](floats))
        assert_close(*([[w.lr for w in step] for step in c] for c in curves), rtol=1e-5, atol=1e-9)
    group_of = {n: i for i, g in enumerate(optimizer.param_groups) for n in g["param_names"]}
    assert_close(weights(model), replay(before, expected, group_of), rtol=0, atol=0)


def test_one_schedule_drives_the_matrices_and_by_its_ratio_the_rest():
    rule = fmuon.adamw(lr_scale=0.3)
    model = Model()
    before = weights(model)
    optimizer = fmuon.FMuon(model, lr=0.01, weight_decay=0.1, auxiliary=rule)
    curve = drive(model, optimizer, SCHEDULERS["LinearLR"](optimizer))
    assert all(first.lr == second.lr for first, second in curve)
    expected = replay(before, curve, dict.fromkeys(before, 0), auxiliary=rule)
    assert_close(weights(model), expected, rtol=0, atol=1e-6)


# ---- compiled ------------------------------------------------------------------------------------


def test_all_schedulers_after_each_other_are_one_graph(counter):
    model = Model()
    optimizer = fmuon.FMuon(groups(model), compile="default", weight_decay=0.1)
    optimizer.warmup()
    fresh = [dict(group) for group in optimizer.param_groups]
    for name, build in SCHEDULERS.items():
        for kind in (float, torch.tensor):
            for group, values in zip(optimizer.param_groups, fresh, strict=True):
                group.clear()
                group.update(values, lr=kind(values["lr"]))
            twin = copy.deepcopy(model)
            plain = fmuon.FMuon(groups(twin, kind), compile=False, weight_decay=0.1)
            plain.load_state_dict(optimizer.state_dict())
            curve = drive(model, optimizer, build(optimizer), stop=6)
            assert drive(twin, plain, build(plain), stop=6) == curve
            assert_close(weights(model), weights(twin), rtol=1e-4, atol=1e-6)
            assert counter.frame_count == 1, name


# ---- checkpoints ---------------------------------------------------------------------------------


def through_a_file(**parts):
    buffer = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


FLOAT_TO_TENSOR, TENSOR_TO_FLOAT = (float, torch.tensor), (torch.tensor, float)


@pytest.mark.parametrize(
    ("name", "mode", "kinds"),
    [
        ("OneCycleLR", "default", FLOAT_TO_TENSOR),
        ("OneCycleLR", False, TENSOR_TO_FLOAT),
        ("SequentialLR", False, FLOAT_TO_TENSOR),
        ("SequentialLR", False, TENSOR_TO_FLOAT),
        ("ReduceLROnPlateau", False, FLOAT_TO_TENSOR),
        ("ReduceLROnPlateau", False, TENSOR_TO_FLOAT),
    ],
)
def test_a_run_resumed_with_the_other_kind_of_lr_equals_an_uninterrupted_one(
    name, mode, kinds, counter
):
    def make(kind):
        model = Model()
        optimizer = fmuon.FMuon(groups(model, kind), compile=mode)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    first, other = make(kinds[0]), make(kinds[1])
    drive(*first.values(), stop=4)
    saved = through_a_file(**first)
    for part, state in saved.items():
        other[part].load_state_dict(state)
    # As with any optimizer of torch, the lr takes the kind that was saved.
    for group in other["optimizer"].param_groups:
        assert isinstance(group["lr"], torch.Tensor) == (kinds[0] is torch.tensor)
    assert drive(*other.values(), start=4) == drive(*first.values(), start=4)
    assert_close(weights(other["model"]), weights(first["model"]), rtol=0, atol=0)
    assert counter.frame_count == (2 if mode else 0)


def warm_up_momentum(optimizer, length=6):
    """A ramp that knows its place by the count in the optimizer's own state."""
    counts = [state["step"] for state in optimizer.state.values()] or [torch.zeros(())]
    momentum = 0.85 + 0.1 * min(1.0, counts[0].item() / length)
    for group in optimizer.param_groups:
        group["momentum"] = momentum
    return momentum


def test_a_momentum_ramp_saved_at_step_3_goes_on_from_there():
    def train(model, optimizer, start, stop):
        ramp = []
        for seed in range(start, stop):
            ramp.append(warm_up_momentum(optimizer))
            gradients(model, seed)
            optimizer.step()
        return ramp

    model, resumed_model = Model(), Model()
    constant = copy.deepcopy(model)
    optimizer = fmuon.FMuon(groups(model))
    ramp = train(model, optimizer, 0, 3)
    saved = through_a_file(model=model, optimizer=optimizer)
    resumed = fmuon.FMuon(groups(resumed_model))
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["momentum"] == ramp[-1]
    rest = train(model, optimizer, 3, 8)
    assert train(resumed_model, resumed, 3, 8) == rest
    assert [*ramp, *rest] == pytest.approx([0.85 + 0.1 * min(1, i / 6) for i in range(8)])
    assert_close(weights(resumed_model), weights(model), rtol=0, atol=0)
    unramped = fmuon.FMuon(groups(constant))
    for seed in range(8):
        gradients(constant, seed)
        unramped.step()
    assert not torch.allclose(constant.second.weight, model.second.weight, atol=1e-4)


# ---- one tensor, two groups ------------------------------------------------------------------------


def rates_under_two_lambdas(optimizer):
    s.LambdaLR(optimizer, [lambda i: 0.5, lambda i: 0.1])
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_one_tensor_given_to_two_groups_is_two_rates():
    shared = torch.tensor(0.1)
    model = Model()
    before = weights(model)
    optimizer = fmuon.FMuon([group | {"lr": shared} for group in groups(model)])
    assert rates_under_two_lambdas(optimizer) == pytest.approx([0.05, 0.01])
    assert shared == torch.tensor(0.1)
    gradients(model, 0)
    optimizer.step()
    written = [Written(float(g["lr"]), tuple(g["betas"])) for g in optimizer.param_groups]
    group_of = {n: i for i, g in enumerate(optimizer.param_groups) for n in g["param_names"]}
    expected = replay(before, [written], group_of, weight_decay=0.0)
    assert_close(weights(model), expected, rtol=0, atol=0)


def test_a_copy_and_its_original_do_not_share_a_tensor_lr():
    model = Model()
    optimizer = fmuon.FMuon(model, lr=torch.tensor(0.1))
    _, copied = copy.deepcopy((model, optimizer))
    loaded = fmuon.FMuon(Model(), lr=0.3)
    loaded.load_state_dict(optimizer.state_dict())
    for other in (copied, loaded):
        assert rates_under_two_lambdas(other) == pytest.approx([0.05, 0.01])
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])


def test_one_tensor_in_two_groups_of_a_loaded_state_dict_is_two_rates():
    # AdamW gives all groups the same tensor, and load_state_dict copies them together.
    plain = [{"params": group["params"]} for group in groups(Model())]
    saved = torch.optim.AdamW(plain, lr=torch.tensor(0.1)).state_dict()
    optimizer = fmuon.FMuon(groups(Model()))
    optimizer.load_state_dict(saved)
    assert rates_under_two_lambdas(optimizer) == pytest.approx([0.05, 0.01])
