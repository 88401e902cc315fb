# SPDX-License-Identifier: Apache-2.0
"""What torch itself does with an optimizer besides stepping it; AdamW shows what is usual."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LinearLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.testing import assert_close

import fmuon
from fmuon.state_dicts import FORMAT


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(7, 6, dtype=dtype)
        self.first = nn.Linear(6, 8, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.second = nn.Linear(8, 6, bias=False, dtype=dtype)
        self.head = nn.Linear(6, 7, bias=False, dtype=dtype)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(self.embed(x))).tanh()))


def batch(seed, size=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(7, (2, size), generator=generator).unbind()


def loss_of(model, seed, size=16):
    x, y = batch(seed, size)
    return nn.functional.cross_entropy(model(x), y)


def make(model, **options):
    return fmuon.FMuon(model, **{"lr": 0.02, "weight_decay": 0.1, **options})


def train(model, optimizer, stop, start=0, after=None):
    for seed in range(start, stop):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
        if after is not None:
            after()


def gradients(model, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator).to(p.dtype)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0)


both_modes = pytest.mark.parametrize("mode", [False, "default"])


# ---- averages of the weights ---------------------------------------------------------------------


@pytest.mark.parametrize("decay", [None, 0.9])
def test_averages_follow_the_weights_and_leave_the_run_alone(decay):
    model, undisturbed = Model(), Model()
    undisturbed.load_state_dict(model.state_dict())
    average = AveragedModel(
        model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay)
    )
    seen = []

    def after():
        average.update_parameters(model)
        seen.append(weights(model))

    train(model, make(model), 5, after=after)
    train(undisturbed, make(undisturbed), 5)
    assert_same_bits(model.state_dict(), undisturbed.state_dict())
    for name, p in average.module.named_parameters():
        expected = seen[0][name]
        for count, w in enumerate((w[name] for w in seen[1:]), 1):
            expected = expected.lerp(w, 1 / (count + 1) if decay is None else 1 - decay)
        assert_close(p.detach(), expected)


def test_stochastic_weight_averaging_from_training_to_the_statistics_of_its_norms():
    model = Model()
    optimizer = make(model)
    scheduler = SWALR(optimizer, swa_lr=0.001, anneal_epochs=2)
    average = AveragedModel(model)

    def after():
        scheduler.step()
        average.update_parameters(model)

    train(model, optimizer, 6, after=after)
    data = [batch(seed)[0] for seed in range(3)]
    update_bn(data, average)
    hidden = torch.stack([average.module.first(average.module.embed(x)) for x in data])
    assert_close(average.module.norm.running_mean, hidden.mean((0, 1)))
    assert_close(average.module.norm.running_var, hidden.var(1).mean(0))
    # Trained further from its average, the model starts where the average is.
    model.load_state_dict(average.module.state_dict())
    start = weights(average.module)
    train(model, optimizer, 7, start=6)
    lr = optimizer.param_groups[0]["lr"]
    assert lr == 0.001
    moves = [p.detach() - start[name] for name, p in model.named_parameters()]
    assert 0 < max(move.abs().max() for move in moves) < 3 * lr


def test_weights_swapped_for_an_evaluation_and_back_leave_the_run_alone():
    model, undisturbed = Model(), Model()
    undisturbed.load_state_dict(model.state_dict())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def swap():
        for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
            p.data, q.data = q.data, p.data

    def evaluate_between_steps():
        average.update_parameters(model)
        swap()
        model.eval()
        loss_of(model, 99)
        model.train()
        swap()

    train(model, make(model), 4, after=evaluate_between_steps)
    train(undisturbed, make(undisturbed), 4)
    assert_same_bits(weights(model), weights(undisturbed))


@both_modes
def test_data_that_replaces_a_parameter_is_what_the_next_step_moves(mode, counter):
    model = Model()
    optimizer = make(model, compile=mode)
    train(model, optimizer, 1)
    twin = copy.deepcopy(model)
    reference = make(twin)
    reference.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        model.first.weight.data = torch.ones_like(model.first.weight)
        twin.first.weight.fill_(1.0)
    for m, o in ((model, optimizer), (twin, reference)):
        gradients(m)
        o.step()
    assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)


# ---- copies --------------------------------------------------------------------------------------


def through_a_file(pair):
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_copies_of_a_compiled_optimizer_with_hooks_scheduler_and_tensor_lr_train_on(counter):
    model = Model()
    optimizer = make(model, lr=torch.tensor(0.02), compile="default")
    scheduler = LinearLR(optimizer, 1.0, 0.5, total_iters=4)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, 2, after=scheduler.step)
    copies = [copy.deepcopy((model, optimizer)), through_a_file((model, optimizer))]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    train(model, optimizer, 4, start=2)
    scheduler.step()
    assert len(calls) == 4
    for count, (other_model, other) in enumerate(copies, 2):
        # Neither the hooks nor the scheduler of the original reach its copies.
        assert [float(group["lr"]) for group in other.param_groups] == rates
        assert all(isinstance(group["lr"], torch.Tensor) for group in other.param_groups)
        train(other_model, other, 4, start=2)
        assert_same_bits(weights(other_model), weights(model))
        assert_same_bits(other.state_dict()["state"], optimizer.state_dict()["state"])
        assert len(calls) == 4 and counter.frame_count == count


def test_a_deepcopy_of_the_optimizer_alone_has_parameters_of_its_own():
    model = Model()
    optimizer = make(model)
    train(model, optimizer, 2)
    lone = copy.deepcopy(optimizer)
    before = weights(model)
    copies = {
        name: p
        for group in lone.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    gradients(model)
    for name, p in model.named_parameters():
        copies[name].grad = p.grad.clone()
    lone.step()
    assert_same_bits(weights(model), before)
    optimizer.step()
    assert_same_bits({name: copies[name].detach() for name in before}, weights(model))


# ---- hooks ---------------------------------------------------------------------------------------


def events(optimizer, model):
    """All hooks of torch, each kind twice, as they come: with what they are told of the step."""
    seen = []

    def note(name):
        def hook(told, *rest):
            assert told is optimizer
            step = "step" in name
            seen.append((name, len(rest[0]), sorted(rest[1])) if step else name)

        return hook

    first = {"prepend": True}
    handles = [
        register_optimizer_step_pre_hook(note("before any step")),
        register_optimizer_step_post_hook(note("after any step")),
        optimizer.register_step_pre_hook(note("before step 1")),
        optimizer.register_step_pre_hook(note("before step 2")),
        optimizer.register_step_post_hook(note("after step 1")),
        optimizer.register_step_post_hook(note("after step 2")),
        optimizer.register_state_dict_pre_hook(note("before saving 1")),
        optimizer.register_state_dict_pre_hook(note("before saving 2"), **first),
        optimizer.register_state_dict_post_hook(note("after saving 1")),
        optimizer.register_state_dict_post_hook(note("after saving 2"), **first),
        optimizer.register_load_state_dict_pre_hook(note("before loading 1")),
        optimizer.register_load_state_dict_pre_hook(note("before loading 2"), **first),
        optimizer.register_load_state_dict_post_hook(note("after loading 1")),
        optimizer.register_load_state_dict_post_hook(note("after loading 2"), **first),
    ]

    def use():
        optimizer.step()
        optimizer.step(lambda: seen.append("closure"))
        optimizer.step(closure=None)
        optimizer.load_state_dict(optimizer.state_dict())

    gradients(model)
    try:
        use()
    finally:
        for handle in handles:
            handle.remove()
    listened = list(seen)
    use()
    assert seen == [*listened, "closure"]
    return listened


def test_all_hooks_come_as_often_and_in_the_order_of_adamw():
    model, other = Model(), Model()
    expected = events(torch.optim.AdamW(other.parameters()), other)
    assert events(make(model), model) == expected
    assert len(expected) == 3 * 6 + 1 + 8 and len(set(map(str, expected))) > 14


def test_hooks_change_what_they_are_given():
    model = Model()
    optimizer = make(model)
    calls = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: calls.append(1)), {}))
    gradients(model)
    optimizer.step()
    assert calls == [1]
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "note": "mine"})
    saved = optimizer.state_dict()
    assert saved["note"] == "mine" and saved["fmuon_format"] == FORMAT
    other = make(Model())
    other.register_load_state_dict_pre_hook(
        lambda o, saved: {
            **saved,
            "param_groups": [{**group, "lr": 0.5} for group in saved["param_groups"]],
        }
    )
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.5]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02]


def test_the_profiler_sees_each_step_once_however_many_optimizers_there_are():
    class Mine(fmuon.FMuon):
        pass

    model = Model()
    optimizers = [make(model), make(Model()), Mine(model, lr=0.02), Mine(model, lr=0.02)]
    optimizers += [copy.deepcopy(optimizers[0]), pickle.loads(pickle.dumps(optimizers[1]))]
    for optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    last = optimizers[2]
    LinearLR(last)
    calls = []
    last.register_step_pre_hook(lambda *_: calls.append(1))
    gradients(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        last.step()
        last.zero_grad()
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("Optimizer.")}
    assert counts == {"Optimizer.step#Mine.step": 1, "Optimizer.zero_grad#Mine.zero_grad": 1}
    assert calls == [1]


# ---- gradients -----------------------------------------------------------------------------------


def test_four_micro_batches_are_one_step_of_the_whole():
    model = Model(torch.float64).eval()
    twin = copy.deepcopy(model)
    whole, parts = make(model), make(twin)
    for seed in range(3):
        x, y = batch(seed)
        whole.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        whole.step()
        parts.zero_grad()
        for xs, ys in zip(x.chunk(4), y.chunk(4), strict=True):
            (nn.functional.cross_entropy(twin(xs), ys) / 4).backward()
        parts.step()
    assert all(state["step"] == 3 for state in parts.state.values())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, q)
        assert_close(whole.state[p], parts.state[q])


def after_zeroing(model, optimizer, set_to_none):
    """Which weights and how many counts a step moves after zero_grad."""
    train(model, optimizer, 2)
    before = weights(model)
    counts = [float(state["step"]) for state in optimizer.state.values()]
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all((p.grad is None) == set_to_none for p in model.parameters())
    optimizer.step()
    moved = [not torch.equal(p, before[name]) for name, p in weights(model).items()]
    later = [float(state["step"]) for state in optimizer.state.values()]
    return moved, [b - a for a, b in zip(counts, later, strict=True)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_after_zero_grad_does_what_it_does_for_adamw(set_to_none):
    model, other = Model(), Model()
    peer = torch.optim.AdamW(other.parameters(), weight_decay=0.1)
    expected = after_zeroing(other, peer, set_to_none)
    assert after_zeroing(model, make(model), set_to_none) == expected
    assert set(expected[0]) == {not set_to_none} and set(expected[1]) == {1.0 - set_to_none}


@both_modes
def test_both_ways_to_zero_gradients_train_alike_and_in_one_graph(mode, counter):
    model = Model()
    twin = copy.deepcopy(model)
    optimizer, plain = make(model, compile=mode), make(twin)
    for seed in range(4):
        for m, o, set_to_none in ((model, optimizer, seed % 2 == 0), (twin, plain, True)):
            o.zero_grad(set_to_none=set_to_none)
            loss_of(m, seed).backward()
            o.step()
    assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == bool(mode)


def test_a_step_leaves_the_gradients_to_be_read_or_accumulated_upon():
    model = Model()
    optimizer = make(model)
    gradients(model)
    kept = [p.grad for p in model.parameters()]
    versions = [g._version for g in kept]
    optimizer.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert [g._version for g in kept] == versions


# ---- clipping and scaling --------------------------------------------------------------------------


def test_clipping_before_the_first_step_changes_no_matrix_and_the_step_grows_with_lr():
    moves = {}
    for lr, most in [(0.01, None), (0.01, 1e-3), (100.0, 1e-3)]:
        torch.manual_seed(0)
        model = Model()
        optimizer = fmuon.FMuon(model, lr=lr)
        before = model.first.weight.detach().clone()
        gradients(model)
        if most is not None:
            assert clip_grad_norm_(model.parameters(), most) > 100 * most
        optimizer.step()
        moves[lr, most] = (model.first.weight.detach() - before) / lr
    # Clipped after the orthogonalisation, the step would be of length 1e-3 whatever lr is.
    assert_close(moves[0.01, 1e-3], moves[0.01, None], rtol=1e-3, atol=1e-4)
    assert_close(moves[100.0, 1e-3], moves[0.01, None], rtol=1e-3, atol=1e-4)
    assert moves[100.0, 1e-3].norm() > 1


def test_a_scaled_run_with_clipping_equals_the_unscaled_one():
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer, plain = make(model), make(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        loss_of(twin, seed).backward()
        clip_grad_norm_(twin.parameters(), 0.05)
        plain.step()
    assert_same_bits(weights(model), weights(twin))


def test_parameter_lists_are_the_two_parts_of_the_model():
    model = Model()
    lists = fmuon.parameter_lists(make(model))
    assert set(lists) == {"muon", "auxiliary"}
    assert {id(p) for p in lists["muon"]} == {id(model.first.weight), id(model.second.weight)}
    every = [*lists["muon"], *lists["auxiliary"]]
    assert len(every) == len(list(model.parameters()))
    assert {id(p) for p in every} == {id(p) for p in model.parameters()}


def test_parameter_lists_look_into_mixed_and_late_groups():
    model, late = Model(), nn.Linear(6, 3)
    optimizer = fmuon.FMuon([{"params": list(model.named_parameters())}], lr=0.02)
    optimizer.add_param_group({"params": [("late.weight", late.weight)], "use_muon": True})
    optimizer.add_param_group({"params": [("late.bias", late.bias)], "use_muon": False})
    lists = fmuon.parameter_lists(optimizer)
    matrices = model.first.weight, model.second.weight, late.weight
    assert {id(p) for p in lists["muon"]} == {id(p) for p in matrices}
    others = {id(p) for p in [*model.parameters(), late.bias]} - {id(p) for p in matrices}
    assert {id(p) for p in lists["auxiliary"]} == others


def test_clipping_the_auxiliary_part_alone_leaves_the_matrices_bit_by_bit():
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    clipped, plain = make(model), make(twin)
    lists = fmuon.parameter_lists(clipped)
    for seed in range(3):
        # Under a momentum clipping counts by its ratios between steps.
        for m in (model, twin):
            gradients(m, seed, scale=10.0 if seed == 1 else 1.0)
        assert clip_grad_norm_(lists["auxiliary"], 1.0) > 5
        norms = torch.stack([p.grad.norm() for p in lists["auxiliary"]])
        assert norms.norm() == pytest.approx(1.0)
        clipped.step()
        plain.step()
    assert_same_bits(model.first.weight, twin.first.weight)
    assert_same_bits(model.second.weight, twin.second.weight)
    assert not torch.allclose(model.head.weight, twin.head.weight, atol=1e-4)


# ---- ways to call a step ---------------------------------------------------------------------------


@both_modes
def test_a_closure_is_called_once_with_gradients_on_and_its_value_returned(mode, counter):
    model = Model()
    twin = copy.deepcopy(model)
    optimizer, plain = make(model, compile=mode), make(twin)
    losses = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, len(losses))
        loss.backward()
        losses.append(loss)
        return loss

    with torch.no_grad():
        values = [optimizer.step(closure), optimizer.step(closure=closure)]
        assert not torch.is_grad_enabled()
    assert len(losses) == 2 and all(v is loss for v, loss in zip(values, losses, strict=True))
    train(twin, plain, 2)
    assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)
    assert optimizer.step() is None


@both_modes
def test_a_step_under_the_users_own_torch_compile_is_the_plain_step(mode, counter):
    model = Model()
    twin = copy.deepcopy(model)
    optimizer, plain = make(model, compile=mode), make(twin)
    if mode:
        optimizer.warmup()
    step = torch.compile(optimizer.step, backend=counter)
    graphs = []
    for seed in range(4):
        for m, o in ((model, optimizer), (twin, plain)):
            gradients(m, seed)
            for group in o.param_groups:
                group["lr"] = 0.02 / (1 + seed)
        step()
        plain.step()
        graphs.append(counter.frame_count)
    assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)
    assert all(state["step"] == 4 for state in optimizer.state.values())
    # In pieces; once the pieces know that lr changes there are no new ones.
    assert 0 < graphs[1] == graphs[-1]


def test_functional_call_and_update_are_the_step_bit_by_bit():
    model = Model()
    optimizer = make(model)
    opt = fmuon.muon(0.02, weight_decay=0.1, labels=fmuon.label(model))
    # BatchNorm counts in place, which no functional call should.
    model.norm.track_running_stats = False
    params, buffers = weights(model), {k: b.clone() for k, b in model.named_buffers()}
    state = opt.init(params)

    def loss(params, x, y):
        return nn.functional.cross_entropy(functional_call(model, (params, buffers), (x,)), y)

    for seed in range(4):
        grads, value = grad_and_value(loss)(params, *batch(seed))
        updates, state = opt.update(grads, state, seed, params)
        params = fmuon.apply_updates(params, updates)
        optimizer.zero_grad()
        expected = loss_of(model, seed)
        expected.backward()
        optimizer.step()
        assert_same_bits(value, expected.detach())
        assert_same_bits(params, weights(model))


# ---- values that the user writes -------------------------------------------------------------------


def test_values_written_to_the_groups_count_from_the_next_step_on_in_the_same_graph(counter):
    model = Model()
    named = dict(model.named_parameters())
    parts = [["first.weight"], ["second.weight"]]
    parts.append([name for name in named if [name] not in parts])
    optimizer = fmuon.FMuon(
        [
            {"params": [(name, named[name]) for name in part], "use_muon": part != parts[-1]}
            for part in parts
        ],
        lr=0.02,
        compile="default",
    )
    opt = fmuon.muon(0.02, labels=fmuon.label(model))
    params = weights(model)
    state = opt.init(params)
    writes = [
        {},
        {"lr": 0.05},
        {"weight_decay": 0.3},
        {"momentum": 0.5},
        {"betas": (0.5, 0.6)},
        {"eps": 1e-2},
        {"lr_scale": 0.1},
        {"lr": torch.tensor(0.07)},
        {"weight_decay": torch.tensor(0.2), "momentum": torch.tensor(0.8)},
        {"betas": (torch.tensor(0.7), 0.9)},
        {"lr": 0, "weight_decay": 0},
        {"lr": 1, "weight_decay": 0.1},
        {},
        {},
    ]
    for step in range(len(writes)):
        # Every group lags a step behind the one before it: no value may reach another group.
        for lag, group in enumerate(optimizer.param_groups):
            group.update(writes[max(step - lag, 0)])
        gradients(model, step)
        of = {name: group for group in optimizer.param_groups for name in group["param_names"]}
        updates, state = opt.update(
            {name: p.grad for name, p in named.items()},
            state,
            step,
            params,
            lr={name: group["lr"] * group["lr_scale"] for name, group in of.items()},
            weight_decay={name: group["weight_decay"] for name, group in of.items()},
            momentum={name: group["momentum"] for name, group in of.items()},
            betas={name: group["betas"] for name, group in of.items()},
            eps={name: group["eps"] for name, group in of.items()},
        )
        params = fmuon.apply_updates(params, updates)
        before = weights(model)
        optimizer.step()
        assert_close(weights(model), params, rtol=1e-5, atol=1e-6)
        for name, p in named.items():
            assert torch.equal(p, before[name]) == (of[name]["lr"] == 0), name
    assert counter.frame_count == 1
