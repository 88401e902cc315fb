# SPDX-License-Identifier: Apache-2.0
"""FMuon under accelerate, beside the same loop in plain torch."""

import copy
import os
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten

import fmuon

os.environ.update(HF_HUB_OFFLINE="1")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

BATCHES, ACCUMULATION, RATE, CLIP = 8, 2, 0.02, 0.3
STEPS = BATCHES // ACCUMULATION
MATRICES = ("first.weight", "second.weight")


@pytest.fixture(autouse=True)
def apart():
    """Accelerators share their state: each test starts without. One thread is enough for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    forget()
    yield
    forget()
    torch.set_num_threads(threads)


def forget():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Model(nn.Module):
    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 8, dtype=dtype)
        self.first = nn.Linear(8, 12, dtype=dtype)
        self.norm = nn.LayerNorm(12, dtype=dtype)
        self.second = nn.Linear(12, 8, dtype=dtype)
        self.head = nn.Linear(8, 16, dtype=dtype)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(self.embed(x))).relu()))


def loader(batch_size=4):
    tokens = torch.randint(16, (2, 4 * BATCHES), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(*tokens)
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def make(model, lr=RATE, epochs=1):
    """The optimizer, and a schedule that writes its rates and betas at every step."""
    optimizer = fmuon.FMuon(model, lr=lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * RATE, STEPS * epochs)
    return optimizer, scheduler


def plain(model, optimizer, scheduler, epochs=1, precision="no"):
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader()):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                out = model(x)
            (cross_entropy(out.float(), y) / ACCUMULATION).backward()
            if index % ACCUMULATION == ACCUMULATION - 1:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


class Accelerated:
    """A prepared model, optimizer and scheduler, and the loop of accelerate's documentation."""

    def __init__(self, model, optimizer, scheduler, precision="no"):
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATION, mixed_precision=precision
        )
        prepared = self.accelerator.prepare(model, optimizer, loader(), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.norms = []

    def train(self, epochs=1):
        for _ in range(epochs):
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(cross_entropy(self.model(x).float(), y))
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                        self.norms.append(norm.item())
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()


def tensors(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same_bits(a, b):
    (leaves, structure), (others, other_structure) = tree_flatten(a), tree_flatten(b)
    assert structure == other_structure
    for one, two in zip(leaves, others, strict=True):
        assert type(one) is type(two)
        if isinstance(one, torch.Tensor):
            assert_close(one, two, rtol=0, atol=0)
        else:
            assert one == two


def assert_same_run(model, optimizer, other, peer):
    assert_same_bits(tensors(model), tensors(other))
    assert_same_bits(optimizer.state_dict(), peer.state_dict())


def assert_muon(model, optimizer, steps):
    """Matrices by Muon, the rest by AdamW, and that many steps of each."""
    for name, p in model.named_parameters():
        kept = optimizer.state[p]
        assert ("momentum_buffer" in kept) == (name in MATRICES)
        assert ("exp_avg" in kept) == (name not in MATRICES)
        assert kept["step"] == steps


# ---- the loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "no"), (torch.float32, "bf16"), (torch.bfloat16, "no")],
    ids=["float32", "autocast", "bfloat16 parameters"],
)
def test_accumulating_clipping_and_scheduling_equal_a_plain_loop(dtype, precision, lr):
    model, other = Model(dtype), Model(dtype)
    optimizer, scheduler = make(model, lr)
    peer, schedule = make(other, lr)
    run = Accelerated(model, optimizer, scheduler, precision)
    assert type(run.scheduler) is accelerate.scheduler.AcceleratedScheduler
    run.train()
    plain(other, peer, schedule, precision=precision)
    assert len(run.norms) == STEPS and min(run.norms) > CLIP
    assert_same_run(model, optimizer, other, peer)
    assert scheduler.last_epoch == schedule.last_epoch == STEPS
    assert_muon(model, optimizer, STEPS)
    for group in optimizer.param_groups:
        assert isinstance(group["lr"], torch.Tensor) == isinstance(lr, torch.Tensor)
    assert not any(map(torch.equal, tensors(model), tensors(Model(dtype))))


def test_autocast_makes_another_run_than_float32():
    runs = []
    for precision in ("no", "bf16"):
        forget()
        model = Model()
        Accelerated(model, *make(model), precision).train()
        runs.append(tensors(model))
    assert not any(map(torch.equal, *runs))


def test_micro_batches_are_steps_of_the_whole_batch():
    model, other = Model(), Model()
    optimizer, scheduler = make(model)
    Accelerated(model, optimizer, scheduler).train()
    peer, schedule = make(other)
    for x, y in loader(4 * ACCUMULATION):
        cross_entropy(other(x), y).backward()
        nn.utils.clip_grad_norm_(other.parameters(), CLIP)
        peer.step()
        schedule.step()
        peer.zero_grad()
    assert_close(tensors(model), tensors(other), rtol=1e-4, atol=1e-5)
    assert_muon(other, peer, STEPS)


def test_parameters_that_are_no_matrices_follow_the_schedule_as_under_adamw():
    runs = []
    for by_fmuon in (True, False):
        forget()
        model = Model()
        if by_fmuon:
            optimizer = fmuon.FMuon(model, weight_decay=0.1, labels={"re:.*": "auxiliary"})
        else:
            optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        # It writes beta1 too.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * RATE, STEPS)
        Accelerated(model, optimizer, scheduler).train()
        runs.append(tensors(model))
    assert_close(*runs, rtol=1e-4, atol=1e-6)


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, dtype, lr):
    model = Model(dtype)
    optimizer, scheduler = make(model, lr, epochs=2)
    straight = Accelerated(model, optimizer, scheduler)
    straight.train()
    straight.accelerator.save_state(str(tmp_path))
    straight.train()
    forget()
    other = Model(dtype, seed=1)
    peer, schedule = make(other, lr, epochs=2)
    resumed = Accelerated(other, peer, schedule)
    resumed.accelerator.load_state(str(tmp_path))
    assert_muon(other, peer, STEPS)
    assert peer.state[other.first.weight]["momentum_buffer"].dtype == torch.float32
    resumed.train()
    assert_same_run(other, peer, model, optimizer)
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()


# ---- prepare -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, STEPS], ids=["new", "after some steps"])
@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float lr", "tensor lr"])
def test_preparing_loads_the_state_into_itself_and_changes_nothing(lr, steps):
    model, other = Model(torch.bfloat16), Model(torch.bfloat16)
    optimizer, scheduler = make(model, lr, epochs=2)
    peer, schedule = make(other, lr, epochs=2)
    if steps:
        plain(model, optimizer, scheduler)
        plain(other, peer, schedule)
    groups = list(optimizer.param_groups)
    loads = []
    optimizer.register_load_state_dict_post_hook(lambda _: loads.append(True))
    Accelerated(model, optimizer, scheduler)
    # That it did: every group is a new dict.
    assert loads == [True]
    assert not any(new is old for new, old in zip(optimizer.param_groups, groups, strict=True))
    assert len(optimizer.state) == (len(tensors(model)) if steps else 0)
    assert_same_bits(optimizer.state_dict(), peer.state_dict())
    assert all(
        own is p
        for group, old in zip(optimizer.param_groups, groups, strict=True)
        for own, p in zip(group["params"], old["params"], strict=True)
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    assert type(rates[0]) is type(lr)
    assert not isinstance(lr, torch.Tensor) or rates[0] is not rates[1]
    plain(model, optimizer, scheduler)
    plain(other, peer, schedule)
    assert_same_run(model, optimizer, other, peer)


def as_module(model):
    return fmuon.FMuon(model, lr=RATE)


def as_named(model):
    return fmuon.FMuon(model.named_parameters(), lr=RATE)


def as_groups_with_names(model):
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if name in MATRICES]
    others = [(name, p) for name, p in named if name not in MATRICES]
    return fmuon.FMuon(
        [{"params": others, "weight_decay": 0.0}, {"params": matrices, "use_muon": True}], lr=RATE
    )


def as_groups_without_names(model):
    matrices = [model.get_parameter(name) for name in MATRICES]
    others = [p for name, p in model.named_parameters() if name not in MATRICES]
    return fmuon.FMuon(
        [
            {"params": others, "algorithm": "adamw"},
            {"params": matrices, "rules": [fmuon.Matrix(), fmuon.Matrix(1, 0)]},
        ],
        lr=RATE,
    )


FORMS = [as_module, as_named, as_groups_with_names, as_groups_without_names]


def prepared_as_by_fsdp2(model, optimizer, monkeypatch, replace, between=lambda: None):
    """Accelerator.prepare for FSDP2 with `replace` in the place of the sharding.

    accelerate's own code puts `torch.empty(1)` in the groups, calls for the sharding, and puts the
    parameters that the model has then in the groups.
    """
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = types.SimpleNamespace(
        set_auto_wrap_policy=lambda model: None, activation_checkpointing=False
    )

    def shard(_, model):
        placeholders = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(p.shape == (1,) and not isinstance(p, nn.Parameter) for p in placeholders)
        between()
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, replace(p))
        return model

    monkeypatch.setattr(accelerate.accelerator, "fsdp2_prepare_model", shard)
    return accelerator._prepare_fsdp2(model, optimizer)[1]


def copied(p):
    return nn.Parameter(p.detach().clone())


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def labels_of(optimizer):
    """All that a group says besides its parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("form", FORMS)
def test_parameters_exchanged_before_the_first_step_are_trained_as_the_old_ones(form, monkeypatch):
    model, other = Model(), Model()
    optimizer, peer = form(model), form(other)
    before, old = copy.deepcopy(labels_of(optimizer)), list(model.parameters())
    values = tensors(model)
    wrapper = prepared_as_by_fsdp2(model, optimizer, monkeypatch, copied)
    assert labels_of(optimizer) == before
    new = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in new} == {id(p) for p in model.parameters()}
    for seed in range(3):
        give_gradients(model, seed)
        give_gradients(other, seed)
        wrapper.step()
        peer.step()
    assert_same_run(model, optimizer, other, peer)
    assert_muon(model, optimizer, 3)
    assert labels_of(optimizer) == before
    assert set(map(id, optimizer.state)) == set(map(id, model.parameters()))
    assert_same_bits([p.detach() for p in old], values)
    assert not any(map(torch.equal, tensors(model), values))


@pytest.mark.parametrize("form", FORMS)
def test_a_load_of_the_state_into_itself_between_the_exchanges_is_harmless(form, monkeypatch):
    model, other = Model(), Model()
    optimizer, peer = form(model), form(other)
    before = copy.deepcopy(labels_of(optimizer))

    def load():
        optimizer.load_state_dict(optimizer.state_dict())

    # The groups hold placeholders the first time, the new parameters the second.
    prepared_as_by_fsdp2(model, optimizer, monkeypatch, copied, between=load)
    load()
    assert labels_of(optimizer) == before
    give_gradients(model, 0)
    give_gradients(other, 0)
    optimizer.step()
    peer.step()
    assert_same_run(model, optimizer, other, peer)


@pytest.mark.parametrize("form", FORMS)
def test_state_has_the_shapes_of_the_parameters_that_are_there_at_the_first_step(form, monkeypatch):
    """As of a rank that holds half of the rows: shapes seen at construction count for nothing."""
    model = Model()
    optimizer = form(model)
    prepared_as_by_fsdp2(
        model, optimizer, monkeypatch, lambda p: nn.Parameter(p.detach()[: len(p) // 2].clone())
    )
    before = tensors(model)
    give_gradients(model, 0)
    optimizer.step()
    assert_muon(model, optimizer, 1)
    assert optimizer.state[model.first.weight]["momentum_buffer"].shape == (6, 8)
    assert optimizer.state[model.head.weight]["exp_avg"].shape == (8, 8)
    assert not any(map(torch.equal, tensors(model), before))


@pytest.mark.parametrize("form", FORMS)
def test_state_saved_after_an_exchange_belongs_to_the_same_names(form, monkeypatch):
    model = Model()
    optimizer = form(model)
    prepared_as_by_fsdp2(model, optimizer, monkeypatch, copied)
    give_gradients(model, 0)
    optimizer.step()
    other = copy.deepcopy(model)
    resumed = form(other)
    resumed.load_state_dict(optimizer.state_dict())
    for seed in range(1, 3):
        give_gradients(model, seed)
        give_gradients(other, seed)
        optimizer.step()
        resumed.step()
    assert_same_run(other, resumed, model, optimizer)


# ---- loss scaling --------------------------------------------------------------------------------


def step_inputs(seed):
    tokens = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(seed))
    return tokens[0], tokens[1]


def everything(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize(
    ("dtype", "clip", "lr"),
    [
        (torch.float32, None, RATE),
        (torch.float32, CLIP, torch.tensor(RATE)),
        (torch.bfloat16, CLIP, RATE),
    ],
    ids=["float32", "clipped, tensor lr", "bfloat16, clipped"],
)
@pytest.mark.parametrize("overflow", [0, 1, 2])
def test_an_overflow_leaves_every_bit_alone_and_halves_the_scale(dtype, clip, lr, overflow):
    model, other = Model(dtype), Model(dtype)
    optimizer, peer = fmuon.FMuon(model, lr=lr), fmuon.FMuon(other, lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index in range(3):
        before = everything(model, optimizer)
        x, y = step_inputs(index)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x).float(), y)).backward()
        if index == overflow:
            model.first.weight.grad[1, 2] = float("inf")
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if index == overflow:
            assert_same_bits(everything(model, optimizer), before)
            assert scaler.get_scale() == scale / 2
            continue
        assert scaler.get_scale() == scale
        assert not torch.equal(model.first.weight, before[0]["first.weight"])
        peer.zero_grad()
        cross_entropy(other(x).float(), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        peer.step()
    # Scales are powers of two, so the run is that without a scaler and without the bad batch.
    assert_same_run(model, optimizer, other, peer)
    assert_muon(model, optimizer, 2)
    assert scaler.get_scale() == 512.0


def test_an_overflow_under_accelerate_skips_the_step_and_the_schedule():
    model, other = Model(), Model()
    optimizer, scheduler = make(model)
    peer, schedule = make(other)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, wrapper, schedule_wrapper = accelerator.prepare(model, optimizer, scheduler)
    for index in range(3):
        before = everything(model, optimizer)
        x, y = step_inputs(index)
        accelerator.backward(cross_entropy(model(x), y))
        if index == 1:
            model.head.bias.grad[0] = float("nan")
        wrapper.step()
        schedule_wrapper.step()
        wrapper.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (index == 1)
        if index == 1:
            assert_same_bits(everything(model, optimizer), before)
            assert accelerator.scaler.get_scale() == 512.0
            continue
        cross_entropy(other(x), y).backward()
        peer.step()
        schedule.step()
        peer.zero_grad()
    assert_same_run(model, optimizer, other, peer)
    assert scheduler.last_epoch == 2
    assert_muon(model, optimizer, 2)
