# SPDX-License-Identifier: Apache-2.0
"""torchtune: an optimizer of bare parameters, named in a config; one for each in backward."""

import copy
import functools
import io

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import fmuon

needed = functools.partial(
    pytest.importorskip, reason="torchtune pins torchao: `make test-torchtune` installs and runs it"
)
config = needed("torchtune.config")
training = needed("torchtune.training")
llama = needed("torchtune.models.llama3_2")
omegaconf = needed("omegaconf")

NAMELESS = "FMuon got parameters without names"
pytestmark = pytest.mark.filterwarnings(f"ignore:{NAMELESS}:UserWarning")

CONFIG = omegaconf.OmegaConf.create(
    """
    optimizer:
      _component_: fmuon.FMuon
      lr: 0.01
      weight_decay: 0.1
    lr_scheduler:
      _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
      num_warmup_steps: 1
    """
)
VOCABULARY = 40


def tiny():
    return llama.llama3_2(
        vocab_size=VOCABULARY,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=16,
        max_seq_len=8,
        intermediate_dim=24,
    )


def built(params, **changes):
    return config.instantiate(CONFIG.optimizer, params, **changes)


def scheduled(optimizer, last_epoch=-1, **changes):
    return config.instantiate(
        CONFIG.lr_scheduler, optimizer, num_training_steps=8, last_epoch=last_epoch, **changes
    )


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
    logits = model(tokens[:, :-1])
    cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def train(model, optimizer, scheduler, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    return tensors(model)


def tensors(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0)


def train_beside(model, twin, optimizers, steps):
    """Steps of all optimizers, each with a schedule of its own, on the gradients of the model."""
    schedulers = [scheduled(optimizer) for optimizer in optimizers]
    for step in steps:
        backward(model, step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        yield [training.get_lr(optimizer) for optimizer in optimizers]


def assert_near(model, twin, start):
    for name, theirs in tensors(twin).items():
        ours = tensors(model)[name]
        if theirs.ndim == 2:
            # Products in bfloat16 on both sides.
            assert (ours - theirs).norm() <= 3e-2 * (theirs - start[name]).norm(), name
        else:
            assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def buffers(optimizer, parameter):
    return {*optimizer.state[parameter]} - {"step"}


# ---- from a config -------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", [False, True])
def test_a_config_builds_it_of_the_parameters_of_the_model(keyword):
    model = tiny()
    with pytest.warns(UserWarning, match=NAMELESS):
        if keyword:
            optimizer = config.instantiate(CONFIG.optimizer, params=model.parameters())
        else:
            optimizer = config.instantiate(CONFIG.optimizer, model.parameters())
    assert type(optimizer) is fmuon.FMuon
    groups = {group["name"]: group for group in optimizer.param_groups}
    held = {name: [id(p) for p in group["params"]] for name, group in groups.items()}
    own = [*model.parameters()]
    assert held["muon"] == [id(p) for p in own if p.ndim == 2]
    assert held["auxiliary"] == [id(p) for p in own if p.ndim == 1]
    assert {group["lr"] for group in groups.values()} == {0.01}
    assert groups["muon"]["weight_decay"] == 0.1


def test_steps_under_the_cosine_schedule_are_those_of_muon_and_adamw_of_torch():
    model = tiny()
    twin, start = copy.deepcopy(model), tensors(model)
    optimizer = built(model.parameters(), preset="torch")
    options = {"lr": 0.01, "weight_decay": 0.1}
    muon = torch.optim.Muon([p for p in twin.parameters() if p.ndim == 2], **options)
    adamw = torch.optim.AdamW([p for p in twin.parameters() if p.ndim == 1], **options)
    rates = [*train_beside(model, twin, (optimizer, muon, adamw), range(4))]
    # The first step had the learning rate 0, and counts.
    assert rates[0] == [0.01] * 3 and rates[3][0] < rates[2][0] < rates[1][0] < 0.01
    assert all(ours == theirs for ours, *pair in rates for theirs in pair)
    assert_near(model, twin, start)
    for parameter in model.parameters():
        slots = {"momentum_buffer"} if parameter.ndim == 2 else {"exp_avg", "exp_avg_sq"}
        assert buffers(optimizer, parameter) == slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_as_lr_is_scheduled_and_read_like_a_number(dtype):
    model = tiny()
    twin = copy.deepcopy(model)
    number = built(model.parameters())
    tensor = built(twin.parameters(), lr=torch.tensor(0.01, dtype=dtype))
    wanted = train(model, number, scheduled(number), range(3))
    got = train(twin, tensor, scheduled(tensor), range(3))
    read = training.get_lr(tensor)
    assert isinstance(read, torch.Tensor)
    assert float(read) == pytest.approx(training.get_lr(number), rel=1e-6)
    if dtype == torch.float64:
        assert_same_bits(got, wanted)


def without_vocabulary(params, **options):
    """What a user names in `_component_`: no names reach it, so shapes tell the embedding."""
    return fmuon.FMuon(
        params,
        labels=lambda _, leaf: "auxiliary" if leaf.shape[0] == VOCABULARY else None,
        **options,
    )


def test_a_factory_in_the_config_leaves_the_embedding_to_adamw():
    model = tiny()
    optimizer = built(model.parameters(), _component_=f"{__name__}.without_vocabulary")
    embedding = model.tok_embeddings.weight
    twin = torch.nn.Parameter(embedding.detach().clone())
    adamw = torch.optim.AdamW([twin], lr=0.01, weight_decay=0.1)
    backward(model, 0)
    twin.grad = embedding.grad.clone()
    for each in (optimizer, adamw):
        each.step()
    assert_close(embedding.detach(), twin.detach())
    assert buffers(optimizer, model.layers[0].mlp.w1.weight) == {"momentum_buffer"}
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}


# ---- optimizer in backward -----------------------------------------------------------------------


def in_backward(model, saved=None, last_epoch=-1):
    """One optimizer per parameter, stepped as soon as its gradient is there."""
    optimizers = {p: built([p]) for p in model.parameters()}
    training.register_optim_in_bwd_hooks(model, optimizers)
    wrapper = training.create_optim_in_bwd_wrapper(model, optimizers)
    if saved is not None:
        wrapper.load_state_dict(saved)
    # No warm-up: up to its first step the scheduler reaches only the optimizer it is made for.
    first = optimizers[next(model.parameters())]
    wrapper.set_lr_scheduler(scheduled(first, last_epoch, num_warmup_steps=0))
    return wrapper


def train_in_backward(model, wrapper, steps):
    for step in steps:
        backward(model, step)
        wrapper.step_lr_scheduler()
    return tensors(model)


def test_one_optimizer_per_parameter_in_backward_trains_as_one_for_all():
    model = tiny()
    twin, start = copy.deepcopy(model), tensors(model)
    wrapper = in_backward(model)
    optimizer = built(twin.parameters())
    scheduler = scheduled(optimizer, num_warmup_steps=0)
    ours = train_in_backward(model, wrapper, range(3))
    assert_same_bits(ours, train(twin, optimizer, scheduler, range(3)))
    assert training.get_lr(wrapper) == training.get_lr(optimizer) < 0.01
    vectors = 0
    for name, parameter in model.named_parameters():
        assert not torch.equal(ours[name], start[name])
        assert parameter.grad is None
        own = wrapper.optim_map[name]
        label, slots = "muon", {"momentum_buffer"}
        if parameter.ndim == 1:
            label, slots = "auxiliary", {"exp_avg", "exp_avg_sq"}
            vectors += 1
        assert [group["name"] for group in own.param_groups] == [label]
        assert buffers(own, parameter) == slots and own.state[parameter]["step"] == 3
    assert vectors == 3


def test_a_run_resumed_from_the_wrapper_equals_an_uninterrupted_one():
    model = tiny()
    wrapper = in_backward(model)
    train_in_backward(model, wrapper, range(2))
    file = io.BytesIO()
    torch.save([model.state_dict(), wrapper.state_dict()], file)
    wanted = train_in_backward(model, wrapper, range(2, 4))
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    again = tiny()
    again.load_state_dict(weights)
    resumed = in_backward(again, saved, last_epoch=1)
    assert_same_bits(train_in_backward(again, resumed, range(2, 4)), wanted)
    assert training.get_lr(resumed) == training.get_lr(wrapper)


# ---- whole checkpoints of the distributed recipes ------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_a_run_resumed_by_the_distributed_recipes_equals_an_uninterrupted_one(one_process):
    model = tiny()
    optimizer = built(model.parameters())
    scheduler = scheduled(optimizer)
    train(model, optimizer, scheduler, range(3))
    cpu = torch.device("cpu")
    saved = training.get_full_optimizer_state_dict(model, optimizer, True, cpu)
    saved, weights = copy.deepcopy([saved, model.state_dict()])
    assert "layers.0.attn.q_proj.weight" in saved["state"]
    wanted = train(model, optimizer, scheduler, range(3, 5))
    again = tiny()
    again.load_state_dict(weights)
    resumed = built(again.parameters())
    # Creating the state that is then loaded over must leave weights and counts alone.
    training.load_from_full_optimizer_state_dict(again, resumed, saved, cpu)
    assert_same_bits(tensors(again), {name: weights[name] for name in tensors(again)})
    assert all(state["step"] == 3 for state in resumed.state.values())
    scheduler = scheduled(resumed, last_epoch=2)
    assert_same_bits(train(again, resumed, scheduler, range(3, 5)), wanted)


# ---- a compiled step -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [built, torch.optim.AdamW])
def test_a_step_compiled_from_outside_takes_no_scheduler_of_any_optimizer(make):
    optimizer = make(tiny().parameters())
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    with pytest.raises(AttributeError, match="__func__"):
        scheduled(optimizer)


def test_a_step_compiled_by_the_config_is_one_graph_under_the_schedule():
    model = tiny()
    # The rest stays frozen: every kernel takes seconds to compile.
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in ("layers.0.mlp.w1.weight", "norm.scale")
    twin, start = copy.deepcopy(model), tensors(model)
    compiled, eager = built(model.parameters(), compile="default"), built(twin.parameters())
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    rates = [*train_beside(model, twin, (compiled, eager), range(4))]
    assert graphs["unique_graphs"] == 1
    assert_near(model, twin, start)
    assert all(ours == theirs for ours, theirs in rates)
