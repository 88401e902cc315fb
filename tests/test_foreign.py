# SPDX-License-Identifier: Apache-2.0
"""Optimizers of another make for the leaves that are no matrices."""

import copy
import io
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing import assert_close

import fmuon


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(7, 6, dtype=dtype)
        self.first = nn.Linear(6, 8, dtype=dtype)
        self.second = nn.Linear(8, 6, dtype=dtype)


class CountsInItsGroup(torch.optim.Optimizer):
    """Keeps its count in the group and needs a learning rate, as some do."""

    def __init__(self, params, lr, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["lr"] / group["seen"])
                self.state[p]["total"] = self.state[p].get("total", 0) + p.grad


class WantsATensor(torch.optim.SGD):
    """Refuses a learning rate that is no tensor, as low-bit optimizers do."""

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.tensor(self.param_groups[-1]["lr"])

    def step(self, closure=None):
        assert all(isinstance(group["lr"], torch.Tensor) for group in self.param_groups)
        return super().step(closure)


PEERS = {
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.99), "weight_decay": 0.3}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "eps": 1e-6}),
    "sgd": (torch.optim.SGD, {"momentum": 0.7, "nesterov": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "rprop": (torch.optim.Rprop, {}),
    "counting": (CountsInItsGroup, {}),
    "tensor lr": (WantsATensor, {"momentum": 0.9}),
}
MATRICES = ("first.weight", "second.weight")


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(model, *optimizers, steps=3, start=0):
    for seed in range(start, start + steps):
        gradients(model, seed)
        for optimizer in optimizers:
            optimizer.step()


def make(model, name, **options):
    return fmuon.FMuon(model, lr=0.01, weight_decay=0.2, auxiliary=PEERS[name], **options)


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_that_optimizer_beside_a_muon_of_its_own(name, dtype):
    model = Model(dtype)
    apart = copy.deepcopy(model)
    train(model, make(model, name))
    named = dict(apart.named_parameters())
    muon = fmuon.FMuon([(n, named.pop(n)) for n in MATRICES], lr=0.01, weight_decay=0.2)
    kind, options = PEERS[name]
    own = {"lr": 0.01, "weight_decay": 0.2} | options
    if name == "rprop":
        del own["weight_decay"]
    train(apart, muon, kind(list(named.values()), **own))
    same_bits(values(model), values(apart))


@pytest.mark.parametrize("name", PEERS)
def test_save_load_continue_equals_uninterrupted(name):
    model = Model()
    optimizer = make(model, name)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    resumed = Model()
    resumed.load_state_dict(weights)
    again = make(resumed, name)
    again.load_state_dict(saved)
    copied = copy.deepcopy((model, optimizer))
    pickled = pickle.loads(pickle.dumps((model, optimizer)))
    for m, o in ((model, optimizer), (resumed, again), copied, pickled):
        train(m, o, start=3)
    for m in (resumed, copied[0], pickled[0]):
        same_bits(values(m), values(model))


def test_one_state_dict_with_one_set_of_group_keys():
    model = Model()
    optimizer = make(model, "amsgrad")
    train(model, optimizer)
    saved = optimizer.state_dict()
    first, second = saved["param_groups"]
    assert set(first) == set(second) and second["amsgrad"] and first["lr"] == second["lr"]
    kept = {
        name: set(saved["state"][index])
        for group in saved["param_groups"]
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }
    assert kept["first.weight"] == {"momentum_buffer", "step"}
    assert kept["first.bias"] == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_another_order_of_parameters_never_swaps_buffers():
    model = Model()
    optimizer = make(model, "adamw")
    train(model, optimizer)
    named = list(model.named_parameters())[::-1]
    reordered = fmuon.FMuon(named, lr=0.01, weight_decay=0.2, auxiliary=PEERS["adamw"])
    reordered.load_state_dict(optimizer.state_dict())
    for p in model.parameters():
        same_bits(dict(reordered.state[p]), dict(optimizer.state[p]))


def test_its_own_learning_rate_becomes_a_ratio_that_schedulers_keep():
    model = Model()
    rule = (torch.optim.SGD, {"lr": 0.002})
    optimizer = fmuon.FMuon(model, lr=0.01, auxiliary=rule)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for seed, rate in enumerate((0.002, 0.001)):
        before = values(model)
        train(model, optimizer, steps=1, start=seed)
        scheduler.step()
        moved = before["first.bias"] - values(model)["first.bias"]
        assert_close(moved, rate * model.first.bias.grad, rtol=1e-4, atol=1e-7)


def test_schedulers_that_write_betas_reach_it():
    model = Model()
    optimizer = fmuon.FMuon(model, lr=0.01, auxiliary=(torch.optim.AdamW, {}))
    other = copy.deepcopy(model)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    cycles = [
        torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9) for o in (optimizer, plain)
    ]
    for seed in range(4):
        train(model, optimizer, steps=1, start=seed)
        train(other, plain, steps=1, start=seed)
        for cycle in cycles:
            cycle.step()
    assert optimizer.param_groups[1]["betas"] == plain.param_groups[0]["betas"]
    before = optimizer.state[model.first.bias]["exp_avg"].clone()
    beta = optimizer.param_groups[1]["betas"][0]
    train(model, optimizer, steps=1, start=9)
    expected = beta * before + (1 - beta) * model.first.bias.grad
    assert_close(optimizer.state[model.first.bias]["exp_avg"], expected)


def test_it_may_be_one_rule_of_several():
    model = Model()
    rules = {"table": (torch.optim.SGD, {"lr": 1.0}), "rest": fmuon.lion()}
    labels = {"embed.weight": "table", "re:.*bias": "rest"}
    optimizer = fmuon.FMuon(model, lr=0.01, auxiliary=rules, labels=labels)
    assert sorted(g["name"] for g in optimizer.param_groups) == ["muon", "rest", "table"]
    before = values(model)
    train(model, optimizer, steps=1)
    assert_close(before["embed.weight"] - model.embed.weight, model.embed.weight.grad)
    assert set(optimizer.state[model.first.bias]) == {"exp_avg", "step"}
    assert optimizer.state[model.embed.weight].keys() <= {"momentum_buffer"}


def test_groups_of_the_user_and_groups_added_later():
    model = Model()
    groups = [
        {"params": [model.first.weight], "use_muon": True},
        {"params": [model.first.bias], "algorithm": "SGD"},
    ]
    optimizer = fmuon.FMuon(groups, lr=0.01, auxiliary=(torch.optim.SGD, {"momentum": 0.5}))
    optimizer.add_param_group({"params": [model.second.bias], "momentum": 0.25, "lr": 0.1})
    assert [g["momentum"] for g in optimizer.param_groups] == [0.95, 0.5, 0.25]
    before = values(model)
    train(model, optimizer, steps=1)
    for layer, rate in ((model.first, 0.01), (model.second, 0.1)):
        name = "first.bias" if layer is model.first else "second.bias"
        assert_close(before[name] - layer.bias, rate * layer.bias.grad, rtol=1e-4, atol=1e-7)


def test_in_a_mixed_group_it_gets_the_vectors_only():
    model = Model()
    group = {"params": [model.first.weight, model.first.bias]}
    with pytest.warns(UserWarning, match="without names"):
        optimizer = fmuon.FMuon([group], lr=0.01, auxiliary=(torch.optim.AdamW, {"lr": 0.002}))
    before = values(model)
    train(model, optimizer, steps=1)
    assert set(optimizer.state[model.first.weight]) == {"momentum_buffer", "step"}
    moved = (before["first.bias"] - model.first.bias).abs()
    assert_close(moved, torch.full_like(moved, 0.002), rtol=1e-3, atol=0)


@pytest.mark.parametrize("missing", [True, False])
def test_a_step_that_is_not_finite_is_left_out_by_both(missing):
    model = Model()
    asked = ("skipped_steps", "update_rms")
    optimizer = make(model, "adamw", nonfinite="skip", metrics=asked)
    train(model, optimizer)
    before = copy.deepcopy((values(model), optimizer.state_dict()["state"]))
    gradients(model, 9)
    if missing:
        model.second.weight.grad = None
    model.embed.weight.grad[0, 0] = float("nan")
    optimizer.step()
    same_bits((values(model), optimizer.state_dict()["state"]), before)
    assert optimizer.metrics()["fmuon/skipped_steps"] == 1
    assert "fmuon/update_rms/first.weight" in optimizer.metrics()


def test_explain_names_it():
    model = Model()
    optimizer = make(model, "adafactor")
    rows = {row.path: row.gets for row in fmuon.explain(model, optimizer).rows}
    assert rows["embed.weight"] == "Adafactor" and rows["first.weight"] == "muon"


def refused(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_errors():
    model = Model()

    def given(auxiliary):
        return refused(
            fmuon.ConfigurationError, lambda: fmuon.FMuon(model, lr=0.1, auxiliary=auxiliary)
        )

    assert_expected_inline(
        given((torch.optim.AdamW, {"bata": 1})),
        """auxiliary: AdamW, tried with one parameter of shape (1,): AdamW.__init__() got an unexpected keyword argument 'bata'""",
    )
    assert_expected_inline(
        given((torch.optim.AdamW, {"eps": -1.0})),
        """auxiliary: AdamW, tried with one parameter of shape (1,): Invalid epsilon value: -1.0""",
    )
    assert_expected_inline(
        given((torch.optim.AdamW, 0.1)),
        """auxiliary: AdamW with 0.1; give (class, dict of its arguments)""",
    )
    assert_expected_inline(
        given("adamw"),
        """auxiliary=adamw: give a rule such as fmuon.adamw(), or a dict name -> rule; FMuon, but not muon, also takes a class of torch optimizers, or (class, dict of its arguments)""",
    )
    assert_expected_inline(
        refused(
            fmuon.ConfigurationError,
            lambda: fmuon.muon(auxiliary=(torch.optim.AdamW, {})),
        ),
        """auxiliary=(<class 'torch.optim.adamw.AdamW'>, {}): give a rule such as fmuon.adamw(), or a dict name -> rule; FMuon, but not muon, also takes a class of torch optimizers, or (class, dict of its arguments)""",
    )
    rules = {"a": (torch.optim.SGD, {}), "b": fmuon.adamw()}
    groups = [{"params": [model.first.bias, model.second.bias], "rules": ["a", "b"]}]
    assert_expected_inline(
        refused(fmuon.ConfigurationError, lambda: fmuon.FMuon(groups, lr=0.1, auxiliary=rules)),
        """a group of SGD and of other rules: make a group for each""",
    )


def test_in_a_mixed_group_it_keeps_its_own_momentum():
    model = Model()
    group = {"params": [("w", model.first.weight), ("b", model.first.bias)]}
    optimizer = fmuon.FMuon([group], lr=0.1, auxiliary=torch.optim.SGD)
    alone = nn.Parameter(model.first.bias.detach().clone())
    plain = torch.optim.SGD([alone], lr=0.1)
    for seed in range(3):
        train(model, optimizer, steps=1, start=seed)
        alone.grad = model.first.bias.grad
        plain.step()
    same_bits(model.first.bias, alone)


def test_its_groups_are_fit_for_schedulers_and_built_in_rules():
    optimizer = fmuon.FMuon(Model(), lr=0.01, auxiliary=torch.optim.SGD)
    assert all(g["betas"] == (0.9, 0.999) and g["eps"] == 1e-8 for g in optimizer.param_groups)


SWAPS = {
    "built in -> foreign": (fmuon.adamw(), torch.optim.Adafactor),
    "foreign -> built in": (torch.optim.SGD, fmuon.adamw()),
    "another": (torch.optim.AdamW, torch.optim.NAdam),
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("named", [True, False])
def test_state_of_another_auxiliary_is_refused_at_loading(swap, named):
    old, new = Model(), Model()
    options = {"lr": 0.01}
    before, after = (
        fmuon.FMuon(
            [
                {"params": [(n, p) if named else p for n, p in m.named_parameters() if p.ndim == d],
                 "use_muon": d == 2}
                for d in (1, 2)
            ],
            auxiliary=rule,
            **options,
        )
        for m, rule in zip((old, new), SWAPS[swap], strict=True)
    )  # fmt: skip
    train(old, before)
    found = refused(fmuon.StateError, lambda: after.load_state_dict(before.state_dict()))
    assert "give the auxiliary that it was saved with" in found


def test_a_matrix_that_became_foreign_and_a_foreign_leaf_of_another_shape_are_refused():
    model, rule = Model(), (torch.optim.SGD, {"momentum": 0.9})
    optimizer = fmuon.FMuon(model, lr=0.01, auxiliary=rule)
    train(model, optimizer)
    moved = fmuon.FMuon(model, lr=0.01, auxiliary=rule, labels={"first.weight": "auxiliary"})
    assert_expected_inline(
        refused(fmuon.StateError, lambda: moved.load_state_dict(optimizer.state_dict())),
        """'first.weight': the state_dict holds the momentum of a matrix, its label here is 'auxiliary'; name it in drop and add""",
    )
    larger = Model()
    larger.embed = nn.Embedding(9, 6)
    resized = fmuon.FMuon(larger, lr=0.01, auxiliary=rule)
    for options in ({}, {"resize": ["embed.weight"]}):
        with pytest.raises(fmuon.StateError, match=r"embed\.weight"):
            resized.load_state_dict(optimizer.state_dict(), **options)


def test_what_is_loaded_is_not_written_to():
    model = Model()
    optimizer = make(model, "adamw")
    train(model, optimizer)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(model, optimizer)
    same_bits(saved["state"], kept["state"])


def test_where_it_fails_no_matrix_has_moved():
    model = Model()
    optimizer = fmuon.FMuon(model, lr=0.01, auxiliary=torch.optim.SparseAdam)
    before = values(model)
    with pytest.raises(RuntimeError, match="dense"):
        train(model, optimizer, steps=1)
    same_bits(values(model)["first.weight"], before["first.weight"])


def test_sparse_gradients_of_a_foreign_leaf_may_be_skipped():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4, bias=False))
    optimizer = fmuon.FMuon(model, lr=0.1, auxiliary=torch.optim.SparseAdam, nonfinite="skip")
    for bad in (False, True):
        before = values(model)
        optimizer.zero_grad()
        (model(torch.tensor([1, 3])).sum() * (float("nan") if bad else 1.0)).backward()
        optimizer.step()
        assert all(torch.equal(before[n], p) == bad for n, p in values(model).items())


def test_global_hooks_run_once():
    seen = []
    handle = register_optimizer_step_post_hook(lambda o, *_: seen.append(o))
    model = Model()
    optimizer = make(model, "adamw")
    train(model, optimizer, steps=2)
    handle.remove()
    assert seen == [optimizer, optimizer]


def test_warming_up_with_nothing_of_its_own_does_nothing():
    model = nn.LayerNorm(4)
    labels = {"re:.*": "auxiliary"}
    fmuon.FMuon(
        model, lr=0.1, labels=labels, auxiliary=torch.optim.AdamW, compile="default"
    ).warmup()
