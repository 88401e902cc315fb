# SPDX-License-Identifier: Apache-2.0
import copy
import io
import pickle
import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.testing import assert_close

import fmuon
from fmuon import optimizer as optimizer_module
from fmuon.functional import configuration_of


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(7, 6, dtype=dtype)
        self.first = nn.Linear(6, 8, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.second = nn.Linear(8, 6, dtype=dtype)
        self.third = nn.Linear(6, 8, bias=False, dtype=dtype)
        self.head = nn.Linear(8, 7, dtype=dtype)

    def forward(self, x):
        return self.head(self.third(self.second(self.norm(self.first(self.embed(x))))))


def gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(model, optimizer, steps, start=0):
    for seed in range(start, start + steps):
        gradients(model, seed)
        optimizer.step()


def tensors(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0)


def make(model, **options):
    return fmuon.FMuon(model, lr=0.01, weight_decay=0.1, **options)


# ---- one core ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_the_functional_core_bit_by_bit(dtype):
    model = Model(dtype)
    opt = fmuon.muon(0.01, weight_decay=0.1, labels=fmuon.label(model))
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    state = opt.init(params)
    optimizer = make(model)
    for step in range(5):
        gradients(model, step)
        grads = {k: p.grad.clone() for k, p in model.named_parameters()}
        optimizer.step()
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        assert_same_bits([p.grad for p in model.parameters()], list(grads.values()))
    assert_same_bits(tensors(model), list(params.values()))
    momentum = optimizer.state[model.first.weight]["momentum_buffer"]
    assert_same_bits(momentum, state["momentum"]["first.weight"])
    assert optimizer.state[model.first.weight]["step"] == 5


def test_presets_read_the_same_row():
    model = Model()
    opt = fmuon.presets.jordan(0.05, labels=fmuon.label(model))
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    optimizer = fmuon.FMuon(model, lr=0.05, preset="jordan")
    gradients(model)
    updates, _ = opt.update({k: p.grad for k, p in model.named_parameters()}, opt.init(params), 0)
    optimizer.step()
    assert_close(tensors(model), list(fmuon.apply_updates(params, updates).values()))
    # Its Adam has a learning rate of its own, 3e-4.
    assert optimizer.param_groups[1]["lr_scale"] == pytest.approx(3e-4 / 0.05)


# ---- groups --------------------------------------------------------------------------------------


def test_a_module_becomes_two_groups_with_one_lr():
    groups = make(Model()).param_groups
    assert [group["name"] for group in groups] == ["muon", "auxiliary"]
    assert [group["lr"] for group in groups] == [0.01, 0.01]
    assert groups[0]["param_names"] == ["first.weight", "second.weight", "third.weight"]
    assert groups[0].keys() == groups[1].keys()


def test_named_and_bare_parameters():
    model = Model()
    named = fmuon.FMuon(model.named_parameters())
    assert "embed.weight" in named.param_groups[1]["param_names"]
    with pytest.warns(UserWarning, match="pass the model"):
        bare = fmuon.FMuon(model.parameters())
    assert len(bare.param_groups[0]["params"]) == 5
    assert "param_names" not in bare.param_groups[0]
    fmuon.FMuon([model.norm.weight])
    with pytest.warns(UserWarning, match=r"of shapes \[\(8, 6\)\]"):
        fmuon.FMuon([model.first.weight])


@pytest.mark.parametrize("flag", [{"use_muon": True}, {"algorithm": "muon"}])
def test_groups_stay_as_they_are_given(flag):
    model = Model()
    off = {key: "adamw" if value == "muon" else False for key, value in flag.items()}
    optimizer = fmuon.FMuon(
        [
            {"params": [model.first.weight, model.second.weight], "lr": 0.5, "fused": None, **flag},
            {"params": [model.embed.weight, model.norm.weight], "name": "rest", **off},
        ]
    )
    first, second = optimizer.param_groups
    assert first["lr"] == 0.5 and "fused" in first and first["rules"] == ["muon", "muon"]
    assert second["name"] == "rest" and second["rules"] == ["auxiliary", "auxiliary"]


def test_a_mixed_group_is_split_by_shape_but_not_into_groups():
    model = Model()
    with pytest.warns(UserWarning, match="pass the model"):
        optimizer = fmuon.FMuon([{"params": list(model.second.parameters())}], lr=0.1)
    assert optimizer.param_groups[0]["rules"] == ["muon", "auxiliary"]
    before = tensors(model)
    gradients(model)
    optimizer.step()
    assert not torch.equal(tensors(model)[5], before[5])


def test_group_lr_scale_and_lr_apply_to_their_group_only():
    model = Model()
    reference, scaled = copy.deepcopy(model), copy.deepcopy(model)
    for m in (model, reference, scaled):
        gradients(m)
    make(model).step()
    optimizer = make(reference)
    optimizer.param_groups[1]["lr"] = 0.03
    optimizer.step()
    optimizer = make(scaled)
    optimizer.param_groups[1]["lr_scale"] = 3.0
    optimizer.step()
    assert_close(tensors(reference), tensors(scaled))
    assert_same_bits(model.first.weight, reference.first.weight)
    assert not torch.equal(model.head.weight, reference.head.weight)


def message(error, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_errors_at_the_door():
    model = Model()
    assert_expected_inline(
        message(fmuon.LeafError, fmuon.FMuon, nn.LayerNorm(3)),
        """no leaf was assigned to Muon (2 auxiliary, 0 frozen); pass the matrices of the model, or label every leaf if this is meant; print(fmuon.explain(model)) shows why each leaf got what it has""",
    )
    optimizer = fmuon.FMuon([{"params": [model.first.weight], "use_muon": True}])
    assert_expected_inline(
        message(
            fmuon.LeafError,
            optimizer.add_param_group,
            {"params": [model.first.bias], "use_muon": True},
        ),
        """'groups[1][0]' (shape (8,)) is not a matrix; give the group rules=[fmuon.Matrix(...)], or train it by the auxiliary rule""",
    )
    assert len(optimizer.param_groups) == 1
    assert_expected_inline(
        message(ValueError, optimizer.add_param_group, {"params": [model.first.weight]}),
        """some parameters appear in more than one parameter group""",
    )
    assert_expected_inline(
        message(ValueError, fmuon.FMuon, [model.first.weight] * 2),
        """some parameters appear more than once in a parameter group""",
    )
    assert_expected_inline(
        message(fmuon.ConfigurationError, fmuon.FMuon, model, preset="adam"),
        """unknown preset 'adam'; known: 'optax', 'muon_with_aux_adam', 'jordan', 'torch', 'moonlight', 'dion', 'normuon', 'adamuon', 'muon_eq', 'muon_plus', 'nanochat'; did you mean 'adamuon'?""",
    )
    assert_expected_inline(
        message(fmuon.ConfigurationError, fmuon.FMuon, model, lr=-1.0),
        """lr=-1.0: must be finite and not negative""",
    )
    assert_expected_inline(
        message(
            fmuon.ConfigurationError, fmuon.FMuon, [{"params": [model.first.weight], "lr": -2}]
        ),
        """lr=-2: must be finite and not negative""",
    )
    assert_expected_inline(
        message(TypeError, fmuon.FMuon, model.first.weight),
        """params: give an iterable of parameters, not a tensor""",
    )


@pytest.mark.parametrize("head_first", [True, False])
def test_tied_weights_get_the_auxiliary_rule_whichever_comes_first(head_first):
    model = nn.Module()
    for name in ("head", "embed") if head_first else ("embed", "head"):
        setattr(model, name, nn.Linear(4, 9, bias=False) if name == "head" else nn.Embedding(9, 4))
    model.head.weight = model.embed.weight
    model.body = nn.Linear(4, 4, bias=False)
    muon, auxiliary = fmuon.FMuon(model).param_groups
    assert muon["param_names"] == ["body.weight"]
    assert auxiliary["params"] == [model.embed.weight]


def test_a_frozen_parameter_is_left_alone_until_it_is_unfrozen():
    model = Model()
    model.first.requires_grad_(False)
    optimizer = make(model)
    before = model.first.weight.detach().clone()
    train(model, optimizer, 2)
    assert_same_bits(model.first.weight.detach(), before)
    assert model.first.weight not in optimizer.state
    model.first.requires_grad_(True)
    train(model, optimizer, 1)
    assert not torch.equal(model.first.weight, before)
    assert optimizer.state[model.first.weight]["step"] == 1


# ---- steps ---------------------------------------------------------------------------------------


def test_a_missing_gradient_leaves_parameter_and_counters_alone():
    for mode in (False, "default"):
        model = Model()
        optimizer = make(model, compile=mode)
        train(model, optimizer, 2)
        before = copy.deepcopy(model.state_dict())
        state = copy.deepcopy(optimizer.state[model.second.weight])
        gradients(model, 5)
        model.second.weight.grad = None
        model.norm.bias.grad = None
        optimizer.step()
        assert_same_bits(model.second.weight.detach(), before["second.weight"])
        assert_same_bits(model.norm.bias.detach(), before["norm.bias"])
        assert_same_bits(optimizer.state[model.second.weight], state)
        assert optimizer.state[model.third.weight]["step"] == 3
        assert not torch.equal(model.third.weight, before["third.weight"])


def test_every_parameter_has_state_after_the_first_step():
    model = Model()
    optimizer = make(model)
    model.first.weight.grad = torch.ones(8, 6)
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))


def test_closures_run_with_gradients_before_they_are_read():
    model = Model()
    optimizer = make(model)
    x = torch.arange(7)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_hooks_run_in_order():
    model, seen = Model(), []
    optimizer = make(model)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, 1)
    assert seen == ["before", "after"]


def schedulers():
    from torch.optim import lr_scheduler as s

    return {
        "lambda": lambda o: s.LambdaLR(o, lambda i: 0.9**i),
        "lambdas": lambda o: s.LambdaLR(o, [lambda i: 0.5, lambda i: 0.1]),
        "step": lambda o: s.StepLR(o, 2),
        "linear": lambda o: s.LinearLR(o),
        "exponential": lambda o: s.ExponentialLR(o, 0.9),
        "cosine": lambda o: s.CosineAnnealingLR(o, 6),
        "restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3),
        "one_cycle": lambda o: s.OneCycleLR(o, 0.1, total_steps=20),
        "cyclic": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        "sequential": lambda o: s.SequentialLR(
            o, [s.LinearLR(o), s.CosineAnnealingLR(o, 5)], milestones=[3]
        ),
    }


@pytest.mark.parametrize("name", schedulers())
def test_schedulers_do_the_same_with_a_tensor_lr_as_with_a_float(name):
    seen = []
    for lr in (0.01, torch.tensor(0.01)):
        torch.manual_seed(0)
        model = Model()
        optimizer = fmuon.FMuon(model, lr=lr)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = schedulers()[name](optimizer)
            history = []
            for seed in range(6):
                train(model, optimizer, 1, seed)
                scheduler.step()
                history.append([float(group["lr"]) for group in optimizer.param_groups])
        seen.append((history, tensors(model)))
    assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-6)


def test_a_shared_tensor_lr_is_cloned_per_group():
    optimizer = fmuon.FMuon(Model(), lr=torch.tensor(0.1))
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda i: 0.5, lambda i: 0.1])
    assert [group["lr"].item() for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])


def test_lr_0_moves_nothing():
    model = Model()
    before = tensors(model)
    train(model, fmuon.FMuon(model, lr=0.0, weight_decay=0.1), 2)
    assert_same_bits(tensors(model), before)


# ---- compiled ------------------------------------------------------------------------------------


def test_one_graph_whatever_schedulers_write_and_whichever_gradients_are_missing(counter):
    model, reference = Model(), None
    reference = copy.deepcopy(model)
    optimizer = make(model, compile="default")
    plain = make(reference, compile=False)
    cycles = [
        torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20) for o in (optimizer, plain)
    ]
    for seed in range(12):
        for m, o in ((model, optimizer), (reference, plain)):
            gradients(m, seed)
            if seed % 3 == 0:
                m.second.weight.grad = None
            if seed % 4 == 0:
                m.norm.weight.grad = None
            o.step()
        for cycle in cycles:
            cycle.step()
        assert_close(tensors(model), tensors(reference), rtol=1e-3, atol=1e-5)
        reference.load_state_dict(model.state_dict())
    assert counter.frame_count == 1


def test_twelve_instances_are_twelve_graphs_and_a_reload_is_none(counter):
    for i in range(12):
        model = Model()
        optimizer = fmuon.FMuon(
            model, lr=0.01 * (i + 1), momentum=0.5 + 0.03 * i, compile="default"
        )
        train(model, optimizer, 2)
    assert counter.frame_count == 12
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(0.1)
    optimizer.load_state_dict(saved)
    train(model, optimizer, 2)
    assert counter.frame_count == 12


def test_inductor_equals_eager():
    model = Model()
    reference = copy.deepcopy(model)
    train(model, make(model, compile="default"), 1)
    train(reference, make(reference), 1)
    assert_close(tensors(model), tensors(reference), rtol=1e-4, atol=1e-5)


def test_warming_up_compiles_and_moves_nothing(counter):
    model = Model()
    before = tensors(model)
    optimizer = make(model, compile="default")
    optimizer.warmup()
    assert counter.frame_count == 1
    assert_same_bits(tensors(model), before)
    assert all(state["step"] == 0 for state in optimizer.state.values())
    train(model, optimizer, 2)
    assert counter.frame_count == 1


def test_auto_compiles_on_accelerators_and_warns_where_it_cannot(monkeypatch):
    for possible in (True, False):
        monkeypatch.setattr(optimizer_module, "can_compile", lambda possible=possible: possible)
        optimizer = make(Model().to("meta"))
        if possible:
            assert optimizer._mode(optimizer._trained()) == "max-autotune"
            continue
        with pytest.warns(UserWarning, match="can't compile here"):
            assert optimizer._mode(optimizer._trained()) is None
        assert optimizer._mode(optimizer._trained()) is None


def test_auto_does_not_compile_on_a_cpu(counter):
    model = Model()
    train(model, make(model), 1)
    assert counter.frame_count == 0


# ---- checkpoints ---------------------------------------------------------------------------------


def saved(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_load_continue_equals_uninterrupted(dtype):
    model = Model(dtype)
    optimizer = make(model)
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = make(other)
    resumed.load_state_dict(saved(optimizer))
    momentum = resumed.state[other.first.weight]["momentum_buffer"]
    assert momentum.dtype == torch.float32
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, 3, start=3)
    assert_same_bits(tensors(other), tensors(model))
    assert_same_bits(resumed.state_dict()["state"], optimizer.state_dict()["state"])


def test_another_order_of_parameters_never_swaps_buffers():
    model = Model()
    optimizer = fmuon.FMuon(model.named_parameters(), lr=0.01)
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = fmuon.FMuon(reversed(list(other.named_parameters())), lr=0.01)
    resumed.load_state_dict(saved(optimizer))
    for name, p in other.named_parameters():
        assert_same_bits(resumed.state[p], optimizer.state[model.get_parameter(name)])
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, 2, start=3)
    assert_same_bits(tensors(other), tensors(model))


@pytest.mark.parametrize(("flat", "direct"), [(True, False), (False, False), (False, True)])
def test_a_distributed_checkpoint_in_another_order_never_swaps_buffers(flat, direct):
    model, other = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "ab")) for _ in "ab")
    optimizer = fmuon.FMuon(model.named_parameters(), lr=0.01)
    train(model, optimizer, 1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    reordered = fmuon.FMuon(list(other.named_parameters())[::-1], lr=0.01)
    if flat or not direct:
        set_optimizer_state_dict(other, reordered, saved, options=options)
    else:
        reordered.load_state_dict(saved)
    for layer, loaded in zip(model, other, strict=True):
        assert_same_bits(dict(reordered.state[loaded.weight]), dict(optimizer.state[layer.weight]))


def test_loading_lists_what_does_not_match():
    model = Model()
    optimizer = make(model)
    train(model, optimizer, 1)
    state_dict = saved(optimizer)
    model.fourth = nn.Linear(3, 4, bias=False)
    model.third = None
    other = make(model)
    assert_expected_inline(
        message(fmuon.StateError, other.load_state_dict, state_dict),
        """state and model don't match; in the model but not in the state (declare in add or rename): ['fourth.weight']; in the state but not in the model (declare in drop or rename): ['third.weight']""",
    )
    assert not other.state
    state_dict["fmuon_format"] = 99
    assert_expected_inline(
        message(fmuon.StateError, other.load_state_dict, state_dict),
        """state_dict of format 99, this fmuon reads up to 1; upgrade fmuon""",
    )


def test_the_phantom_step_of_distributed_checkpoints_only_creates_state():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = Model()
    optimizer = make(model)
    before = tensors(model)
    state_dict = get_optimizer_state_dict(model, optimizer)
    assert_same_bits(tensors(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert set(state_dict["state"]) == set(dict(model.named_parameters()))
    assert all(state["step"] == 0 for state in optimizer.state.values())
    untouched = copy.deepcopy(model)
    train(model, optimizer, 1)
    train(untouched, make(untouched), 1)
    assert_same_bits(tensors(model), tensors(untouched))


def test_pickle_and_deepcopy_keep_training():
    model = Model()
    optimizer = make(model, nesterov=False)
    train(model, optimizer, 2)
    copied_model, copied = copy.deepcopy((model, optimizer))
    pickled_model, pickled = pickle.loads(pickle.dumps((model, optimizer)))
    for m, o in ((model, optimizer), (copied_model, copied), (pickled_model, pickled)):
        train(m, o, 2, start=2)
    assert_same_bits(tensors(copied_model), tensors(model))
    assert_same_bits(tensors(pickled_model), tensors(model))
    pickled.add_param_group({"params": [("late", nn.Parameter(torch.zeros(3, 3)))]})
    assert pickled.param_groups[-1]["rules"] == ["muon"]


def test_copies_do_not_share_work_with_other_ranks(one_process):
    model = Model()
    optimizer = make(model, mesh=torch.distributed.group.WORLD)
    train(model, optimizer, 1)
    copied_model, copied = pickle.loads(pickle.dumps((model, optimizer)))
    assert configuration_of(optimizer).mesh and configuration_of(copied).mesh is None
    for m, o in ((model, optimizer), (copied_model, copied)):
        train(m, o, 2, start=1)
    assert_same_bits(tensors(copied_model), tensors(model))


def test_gradient_scaler_with_an_overflow_leaves_everything_alone():
    model = Model()
    optimizer = make(model)
    train(model, optimizer, 1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.tensor(1.0))
    gradients(model)
    model.first.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits((model.state_dict(), optimizer.state_dict()["state"]), before)
    assert scaler.get_scale() == 2.0


# ---- labels, flags, missing gradients -------------------------------------------------------------


def test_labels_reach_named_parameters_and_groups_with_names():
    model = Model()
    labels = {"re:head.*": "frozen", "first.weight": "auxiliary"}
    for params in (model, model.named_parameters(), [{"params": model.named_parameters()}]):
        optimizer = fmuon.FMuon(params, labels=labels)
        rules = {
            name: rule
            for group in optimizer.param_groups
            for name, rule in zip(group["param_names"], group["rules"], strict=True)
        }
        assert rules["first.weight"] == "auxiliary" and rules["second.weight"] == "muon"
        assert rules.get("head.weight", "frozen") == "frozen"
    groups = [{"params": list(model.named_parameters())}]
    with pytest.raises(fmuon.LeafError, match=r"labels key 'firts\.weight' matches no leaf"):
        fmuon.FMuon(groups, labels={"firts.weight": "auxiliary"})
    with pytest.raises(fmuon.ConfigurationError, match="labels need names"):
        fmuon.FMuon(model.parameters(), labels=labels)


def test_unknown_algorithms_are_refused():
    model = Model()
    assert_expected_inline(
        message(
            fmuon.ConfigurationError,
            fmuon.FMuon,
            [{"params": [model.first.weight], "algorithm": "lion"}],
        ),
        """unknown algorithm 'lion'; known: 'muon', 'auxiliary', 'adamw'""",
    )


@pytest.mark.parametrize("mode", [False, "default"])
def test_missing_zero_moves_by_the_momentum_alone(counter, mode):
    model = Model()
    optimizer = make(model, compile=mode, missing="zero")
    train(model, optimizer, 1)
    other = copy.deepcopy(model)
    zeros = make(other)
    zeros.load_state_dict(optimizer.state_dict())
    gradients(model, 1)
    gradients(other, 1)
    model.second.weight.grad = None
    other.second.weight.grad.zero_()
    for o in (optimizer, zeros):
        o.step()
    assert_close(tensors(model), tensors(other), rtol=1e-4, atol=1e-6)


def test_missing_error_names_the_parameter_and_moves_nothing():
    model = Model()
    optimizer = make(model, missing="error")
    before = tensors(model)
    gradients(model)
    model.second.weight.grad = None
    with pytest.raises(fmuon.LeafError, match=r"second\.weight"):
        optimizer.step()
    assert_same_bits(tensors(model), before)


def test_a_state_dict_of_another_optimizer_keeps_the_rules():
    model = Model()
    named = list(model.named_parameters())
    peer = torch.optim.AdamW(named, lr=0.5)
    optimizer = fmuon.FMuon([{"params": named}])
    optimizer.load_state_dict(peer.state_dict())
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.5 and group["rules"].count("muon") == 3 and group["lr_scale"] == 1.0
    train(model, optimizer, 1)


# ---- cases found by attack -------------------------------------------------------------------------


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


def test_groups_without_a_name_keep_their_own_values_over_a_load():
    groups = [
        {"params": [("a", parameter(3, 4))], "lr": 0.1},
        {"params": [("b", parameter(3, 4))], "lr": 0.2, "weight_decay": 0.5},
    ]
    optimizer = fmuon.FMuon(groups)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]
    single = fmuon.FMuon([{"params": [p for g in groups for p in g["params"]]}])
    with pytest.raises(fmuon.StateError, match="1 groups, the optimizer 2"):
        optimizer.load_state_dict(single.state_dict())


def test_a_label_for_one_leaf_leaves_the_routing_of_the_others():
    model = Model()
    optimizer = fmuon.FMuon(model, labels={"second.weight": fmuon.Matrix(blocks=(3, 3))})
    assert "embed.weight" in optimizer.param_groups[1]["param_names"]
    assert "head.weight" in optimizer.param_groups[1]["param_names"]
    why = {
        row.path: row.why
        for row in fmuon.explain(model, fmuon.muon(labels={"embed.weight": "frozen"})).rows
    }
    assert why["first.weight"] == "a linear layer" and why["embed.weight"].startswith("labels")


def test_two_parameters_with_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two parameters have the name \['w'\]"):
        fmuon.FMuon([("w", parameter(2, 2)), ("w", parameter(2, 2))])
    optimizer = fmuon.FMuon([("w", parameter(2, 2))])
    with pytest.raises(ValueError, match=r"two parameters have the name \['w'\]"):
        optimizer.add_param_group({"params": [("w", parameter(2, 2))]})


@pytest.mark.parametrize("mode", [False, "default"])
@pytest.mark.parametrize("missing", ["skip", "zero", "error"])
def test_warming_up_moves_nothing_whatever_missing_means(counter, mode, missing):
    model = Model()
    optimizer = make(model, compile=mode, missing=missing)
    train(model, optimizer, 1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for p in model.parameters():
        p.grad = None
    optimizer.warmup()
    assert_same_bits((model.state_dict(), optimizer.state_dict()["state"]), before)


def test_in_a_mixed_group_the_rule_keeps_its_betas_decay_and_ratio():
    w, b = parameter(3, 3), parameter(3)
    rule = fmuon.adamw((0.5, 0.6), eps=1e-3, lr_scale=0.5, weight_decay=0.0)
    optimizer = fmuon.FMuon(
        [{"params": [("w", w), ("b", b)]}], lr=0.1, weight_decay=1.0, auxiliary=rule
    )
    params = {"w": w.detach().clone(), "b": b.detach().clone()}
    opt = fmuon.muon(0.1, weight_decay=1.0, auxiliary=rule)
    state = opt.init(params)
    for step in range(3):
        grads = {k: torch.randn_like(p) for k, p in params.items()}
        w.grad, b.grad = grads["w"].clone(), grads["b"].clone()
        optimizer.step()
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
    assert_close({"w": w.detach(), "b": b.detach()}, params)


def test_rules_that_differ_within_a_group_must_be_told_apart():
    rules = {"one": fmuon.adamw((0.9, 0.99)), "two": fmuon.lion()}
    group = {"params": [parameter(3), parameter(4)], "rules": ["one", "two"]}
    with pytest.raises(fmuon.ConfigurationError, match=r"\['adamw', 'lion'\] differ in eps"):
        fmuon.FMuon([group | {"betas": (0.9, 0.99)}], auxiliary=rules)


def test_labels_that_no_step_could_follow_are_refused_at_the_door():
    for group in (
        {"rules": ["error"]},
        {"rules": ["muno"]},
        {"use_muon": True, "betas": (1.5, 2.0)},
    ):
        with pytest.raises(fmuon.FMuonError):
            fmuon.FMuon([{"params": [parameter(3, 3)], **group}])
    with pytest.raises(fmuon.LeafError, match="complex"):
        fmuon.FMuon([("w", nn.Parameter(torch.randn(3, 3, dtype=torch.complex64)))])
    with pytest.raises(fmuon.ConfigurationError, match="compile=3"):
        fmuon.FMuon(Model(), compile=3)
    w = parameter(4, 2)
    optimizer = fmuon.FMuon([{"params": [w]}], preset="optax")
    assert optimizer.param_groups[0]["rules"] == [
        {"fan_out": 1, "fan_in": 0, "blocks": None, "blocks_in": None}
    ]


def test_toggling_requires_grad_compiles_once_per_set(counter):
    model = Model()
    optimizer = make(model, compile="default")
    for seed in range(8):
        model.first.requires_grad_(seed % 2 == 0)
        train(model, optimizer, 1, seed)
    assert counter.frame_count == 2


def test_state_of_another_optimizer_is_refused_at_loading():
    model = Model()
    named = list(model.named_parameters())
    peer = torch.optim.AdamW(named)
    gradients(model)
    peer.step()
    optimizer = fmuon.FMuon([{"params": named}])
    with pytest.raises(fmuon.StateError, match=r"'first\.weight'.*exp_avg.*momentum_buffer"):
        optimizer.load_state_dict(peer.state_dict())
    assert not optimizer.state


def test_load_hooks_see_and_change_what_is_loaded():
    model = Model(torch.bfloat16)
    optimizer = make(model)
    train(model, optimizer, 1)
    other, seen = make(model), []

    def before(_, state_dict):
        state_dict["state"] = {
            index: {name: torch.full_like(value, 7) for name, value in state.items()}
            for index, state in state_dict["state"].items()
        }

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[model.first.weight]["momentum_buffer"])
    )
    other.load_state_dict(optimizer.state_dict())
    assert seen[0].dtype == torch.float32 and (seen[0] == 7).all()


def test_a_group_value_as_numpy_or_under_another_default_device():
    model = Model()
    with torch.device("meta"):
        optimizer = make(model)
        optimizer.step()
    gradients(model)
    with torch.device("meta"):
        optimizer.step()
    assert optimizer.state[model.first.weight]["step"] == 1


# ---- variants ------------------------------------------------------------------------------------


def test_second_moment_and_dtypes_are_part_of_the_state_dict():
    options = {
        "second_moment": "normuon",
        "momentum_dtype": torch.bfloat16,
        "auxiliary": fmuon.adamw(mu_dtype=torch.bfloat16),
    }
    model = Model()
    optimizer = fmuon.FMuon(model, lr=0.01, **options)
    gradients(model)
    optimizer.step()
    kept = optimizer.state[model.first.weight]
    assert kept["momentum_buffer"].dtype == torch.bfloat16
    assert kept["second_momentum_buffer"].shape == (model.first.weight.shape[0], 1)
    twin = copy.deepcopy(model)
    other = fmuon.FMuon(twin, lr=0.01, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        two.grad = one.grad.clone()
    optimizer.step()
    other.step()
    assert_same_bits(tensors(model), tensors(twin))
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(optimizer.state.get(one, {}), other.state.get(two, {}))


def test_a_learning_rate_of_a_rule_becomes_a_ratio():
    model = Model()
    optimizer = fmuon.FMuon(model, lr=0.02, auxiliary=fmuon.adamw(lr=0.005))
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02]
    assert optimizer.param_groups[1]["lr_scale"] == pytest.approx(0.25)
    with pytest.raises(fmuon.ConfigurationError, match="lr_scale"):
        fmuon.FMuon(model, lr=0.0, auxiliary=fmuon.adamw(lr=0.005))
    with pytest.raises(fmuon.ConfigurationError, match="lr_scale"):
        fmuon.FMuon(model, lr=0.1, auxiliary=fmuon.adamw(lr=lambda step: 0.1))
