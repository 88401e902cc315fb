# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer drives FMuon; it must do what a loop written out by hand does."""

import copy
import csv
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.testing import assert_close
from torch.utils.data import DataLoader

import fmuon

lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
loggers = pytest.importorskip("lightning.pytorch.loggers")
plugins = pytest.importorskip("lightning.pytorch.plugins")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


MATRICES = {"first.weight", "second.weight"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(self.norm(self.first(x)))))


class Module(lightning.LightningModule):
    """A net under automatic optimization that notes how the optimizer's step is called."""

    def __init__(self, net, configure, **options):
        super().__init__()
        self.net, self.configure, self.options = net, configure, options
        self.closures, self.evaluations = [], 0

    def loss(self, batch):
        self.evaluations += 1
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = make(self.net, **self.options)
        optimizer.register_step_pre_hook(
            lambda _, args, kwargs: self.closures.append(kwargs.get("closure"))
        )
        return self.configure(optimizer)


class Manual(Module):
    """The same with the loop in the hands of the module."""

    def __init__(self, *args, by_closure, **options):
        super().__init__(*args, **options)
        self.automatic_optimization, self.by_closure = False, by_closure

    def training_step(self, batch):
        optimizer = self.optimizers()
        assert isinstance(optimizer, fmuon.FMuon)

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        if self.by_closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()
        self.lr_schedulers().step()


def make(net, **options):
    return fmuon.FMuon(net, **{"lr": 0.1, "weight_decay": 0.1, **options})


def one_cycle(optimizer):
    return OneCycleLR(optimizer, [0.1, 0.04], total_steps=12)


def with_one_cycle(optimizer):
    schedule = {"scheduler": one_cycle(optimizer), "interval": "step"}
    return {"optimizer": optimizer, "lr_scheduler": schedule}


def trainer(folder, steps, **options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=folder,
        **(quiet | options),
    )


def batches(count):
    return [(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(count)]


def loader(data):
    return DataLoader(data, batch_size=None)


def by_hand(net, data, *, clip=None, accumulate=1, autocast=nullcontext, **options):
    """The same run without Lightning; also what the groups held before each step."""
    optimizer, seen = make(net, **options), []
    schedule = one_cycle(optimizer)
    for start in range(0, len(data), accumulate):
        seen.append(
            [
                (float(group["lr"]), group["betas"][0], group["weight_decay"])
                for group in optimizer.param_groups
            ]
        )
        optimizer.zero_grad()
        for x, y in data[start : start + accumulate]:
            with autocast():
                loss = nn.functional.mse_loss(net(x), y)
            (loss / accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], clip
            )
        optimizer.step()
        schedule.step()
    return optimizer, seen


def weights(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def states(net, optimizer):
    return {name: optimizer.state[p] for name, p in net.named_parameters()}


def assert_same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0)


# ---- automatic optimization ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "hand"),
    [
        ({}, {}),
        ({"gradient_clip_val": 0.05}, {"clip": 0.05}),
        ({"accumulate_grad_batches": 2}, {"accumulate": 2}),
        (
            {"precision": "bf16-mixed"},
            {"autocast": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)},
        ),
    ],
    ids=["plain", "clipped", "accumulated", "bf16-mixed"],
)
def test_one_optimizer_trains_all_leaves_as_a_loop_by_hand(tmp_path, settings, hand):
    net, data = Net(), batches(6)
    before = weights(net)
    twin, plain = copy.deepcopy(net), copy.deepcopy(net)
    module = Module(net, with_one_cycle)
    fit = trainer(tmp_path, 6 // settings.get("accumulate_grad_batches", 1), **settings)
    fit.fit(module, loader(data))
    reference, _ = by_hand(twin, data, **hand)
    assert_same_bits(weights(net), weights(twin))
    (optimizer,) = fit.optimizers
    assert_same_bits(states(net, optimizer), states(twin, reference))
    for name, p in net.named_parameters():
        assert ("momentum_buffer" in optimizer.state[p]) == (name in MATRICES), name
        assert not torch.equal(p, before[name]), name
    if settings:
        by_hand(plain, data)
        assert not torch.equal(plain.first.weight, net.first.weight)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_step_gets_a_closure_and_runs_it_once(tmp_path, accumulate):
    module = Module(Net(), with_one_cycle)
    trainer(tmp_path, 3, accumulate_grad_batches=accumulate).fit(
        module, loader(batches(3 * accumulate))
    )
    assert [callable(closure) for closure in module.closures] == [True] * 3
    assert module.evaluations == 3 * accumulate


def test_an_overflow_under_float16_skips_the_step(tmp_path):
    net, data = Net(), batches(3)
    twin = copy.deepcopy(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    class Overflowing(Module):
        def on_after_backward(self):
            if self.evaluations == 2:
                self.net.first.weight.grad[0, 0] = float("inf")

    module = Overflowing(net, lambda optimizer: optimizer)
    precision = plugins.MixedPrecision("16-mixed", "cpu", scaler)
    trainer(tmp_path, 3, plugins=[precision], gradient_clip_val=0.05).fit(module, loader(data))
    optimizer = make(twin)
    other = torch.amp.GradScaler("cpu", init_scale=4.0)
    for index in (0, 2):
        x, y = data[index]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = nn.functional.mse_loss(twin(x), y)
        other.scale(loss).backward()
        other.unscale_(optimizer)
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], 0.05
        )
        other.step(optimizer)
        other.update(2.0 if index == 0 else None)
    assert scaler.get_scale() == 2.0
    assert module.closures == [None, None]
    assert_same_bits(weights(net), weights(twin))


# ---- schedulers and what is logged ---------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_the_monitor_logs_each_group_under_its_name(tmp_path, lr):
    options = {"lr": lr, "auxiliary": fmuon.adamw((0.8, 0.99), weight_decay=0.0)}
    net, data = Net(), batches(6)
    twin = copy.deepcopy(net)
    monitor = callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    logger = loggers.CSVLogger(tmp_path)
    fit = trainer(
        tmp_path, 6, callbacks=[monitor], logger=logger, log_every_n_steps=1, gradient_clip_val=1.0
    )
    fit.fit(Module(net, with_one_cycle, **options), loader(data))
    _, seen = by_hand(twin, data, clip=1.0, **options)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["lr-FMuon/muon"]]
    assert [int(row["step"]) for row in rows] == list(range(6))
    names = "lr-FMuon/muon", "lr-FMuon/auxiliary"
    logged = [
        [
            tuple(float(row[name + suffix]) for suffix in ("", "-momentum", "-weight_decay"))
            for name in names
        ]
        for row in rows
    ]
    assert logged == seen
    # The two groups and the steps differ, so no value stands in for another.
    assert len({value[0] for values in seen for value in values}) == 12
    assert [values[2] for values in seen[0]] == [0.1, 0.0]
    assert {key for key in rows[0] if "FMuon" in key} == {
        name + suffix for name in names for suffix in ("", "-momentum", "-weight_decay")
    }


def exponential(optimizer):
    return ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("configure", "halvings"),
    [
        (lambda o: o, 0),
        (lambda o: ([o], [exponential(o)]), 2),
        (lambda o: {"optimizer": o, "lr_scheduler": exponential(o)}, 2),
        (
            lambda o: {
                "optimizer": o,
                "lr_scheduler": {"scheduler": exponential(o), "interval": "step", "frequency": 2},
            },
            4,
        ),
        (
            lambda o: {
                "optimizer": o,
                "lr_scheduler": {
                    "scheduler": ReduceLROnPlateau(o, "max", 0.5, patience=0, threshold=1e9),
                    "monitor": "loss",
                },
            },
            1,
        ),
    ],
    ids=["none", "lists", "dict", "every_other_step", "plateau"],
)
def test_schedulers_move_both_groups(tmp_path, configure, halvings):
    module = Module(Net(), configure, auxiliary=fmuon.adamw(lr_scale=0.25))
    fit = trainer(tmp_path, -1, max_epochs=2)
    fit.fit(module, loader(batches(4)))
    (optimizer,) = fit.optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 * 0.5**halvings] * 2
    assert [group["lr_scale"] for group in optimizer.param_groups] == [1.0, 0.25]
    assert len(module.closures) == 8


# ---- manual optimization -------------------------------------------------------------------------


@pytest.mark.parametrize("by_closure", [True, False], ids=["closure", "no_closure"])
def test_manual_optimization_equals_a_loop_by_hand(tmp_path, by_closure):
    net, data = Net(), batches(5)
    twin = copy.deepcopy(net)
    module = Manual(net, with_one_cycle, by_closure=by_closure)
    fit = trainer(tmp_path, 5)
    fit.fit(module, loader(data))
    reference, _ = by_hand(twin, data)
    assert_same_bits(weights(net), weights(twin))
    assert_same_bits(states(net, fit.optimizers[0]), states(twin, reference))
    assert module.evaluations == 5


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint:UserWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_resumed_fit_equals_an_uninterrupted_one(tmp_path, precision):
    # Lightning's resumed loader is one batch off, so all batches are the same.
    net, data = Net(), batches(1) * 8
    settings = {"precision": precision, "gradient_clip_val": 0.5}
    straight, interrupted = copy.deepcopy(net), copy.deepcopy(net)
    full = trainer(tmp_path, 6, **settings)
    full.fit(Module(straight, with_one_cycle), loader(data))
    first = trainer(tmp_path, 3, **settings)
    first.fit(Module(interrupted, with_one_cycle), loader(data))
    first.save_checkpoint(tmp_path / "checkpoint.ckpt")
    resumed = Net()
    second = trainer(tmp_path, 6, **settings)
    module = Module(resumed, with_one_cycle, lr=0.7, weight_decay=0.0)
    second.fit(module, loader(data), ckpt_path=tmp_path / "checkpoint.ckpt", weights_only=True)
    assert len(module.closures) == 3
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for p in resumed.parameters()} == {dtype}
    kept = states(resumed, second.optimizers[0])
    assert kept["first.weight"]["momentum_buffer"].dtype == torch.float32
    assert_same_bits(weights(resumed), weights(straight))
    assert_same_bits(kept, states(straight, full.optimizers[0]))
    assert not torch.equal(interrupted.first.weight, straight.first.weight)
