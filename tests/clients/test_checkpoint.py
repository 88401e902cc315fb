# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint: FMuon in two processes that train replicas of one model."""

import copy
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.testing import assert_close

import fmuon

FLATTEN = pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
FLOATS = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


# ---- two processes -------------------------------------------------------------------------------


class Pair:
    """Two processes of one gloo group that run the same function side by side."""

    seconds = 120

    def __init__(self, folder):
        self.folder, self.starts = folder, 0
        self.processes, self.pipes = [], []

    def __call__(self, function, *args):
        """Run a function of this module in both; an error in either is the error of the test."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, args))
        waiting, errors, seconds = list(self.pipes), [], self.seconds
        while waiting and (ready := wait(waiting, seconds)):
            errors += filter(None, [pipe.recv() for pipe in ready])
            waiting = [pipe for pipe in waiting if pipe not in ready]
            # After an error in one, the other may wait for it in vain.
            seconds = 5 if errors else self.seconds
        if waiting:
            self.stop()
            errors.append(f"{len(waiting)} of 2 processes gave no answer")
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)

    def start(self):
        self.starts += 1
        context = multiprocessing.get_context("spawn")
        for rank in range(2):
            ours, theirs = context.Pipe()
            rendezvous = f"file://{self.folder}/rendezvous-{self.starts}"
            process = context.Process(target=serve, args=(rank, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def stop(self):
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self.processes, self.pipes = [], []


def serve(rank, rendezvous, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rendezvous, timedelta(seconds=Pair.seconds), world_size=2, rank=rank
    )
    while True:
        function, args = pipe.recv()
        torch.manual_seed(0)
        try:
            function(*args)
            pipe.send(None)
        except Exception:
            pipe.send(f"rank {rank}:\n{traceback.format_exc()}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.stop()


# ---- what they run -------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(7, 6, dtype=dtype)
        self.first = nn.Linear(6, 6, dtype=dtype)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, dtype=dtype)
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.second = nn.Linear(6, 6, dtype=dtype)
        self.head = nn.Linear(6, 7, dtype=dtype)

    def forward(self, x):
        x = self.first(self.embed(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.second(self.norm(x)))


MATRICES = {
    "first.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "second.weight",
}


def train(model, optimizer, steps, idle=()):
    """Steps on gradients that depend on nothing but the step and the name of the parameter."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, p in sorted(model.named_parameters()):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if name in idle else grad
        optimizer.step()
    optimizer.zero_grad()


def assert_same_bits(a, b):
    assert_close(a, b, rtol=0, atol=0)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def states(model, optimizer):
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def values(optimizer):
    """The groups without their parameters, sequences as tuples."""
    return [
        {k: tuple(v) if isinstance(v, list) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def save(folder, model, optimizer, options=None):
    dcp.save(
        {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        },
        checkpoint_id=folder,
    )


def load(folder, model, optimizer, options=None, no_dist=False):
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder, no_dist=no_dist)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def fresh(dtype=torch.float32):
    """A model with weights of its own, which only a checkpoint can make equal to another's."""
    torch.manual_seed(1 + dist.get_rank())
    return Model(dtype)


def resume_data_parallel_training(folder, dtype, momentum_dtype, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def steps(model, optimizer, schedule, numbers):
        for number in numbers:
            generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
            tokens = torch.randint(7, (4, 3), generator=generator)
            optimizer.zero_grad()
            model(tokens).float().square().mean().backward()
            optimizer.step()
            schedule.step()

    def make(model, lr, **options):
        model = DistributedDataParallel(model)
        optimizer = fmuon.FMuon(model, lr=lr, momentum_dtype=momentum_dtype, **options)
        return model, optimizer, OneCycleLR(optimizer, [lr, lr / 2], total_steps=10)

    model, optimizer, schedule = make(Model(dtype), 0.1, weight_decay=0.1, momentum=0.9)
    steps(model, optimizer, schedule, range(3))
    save(folder, model, optimizer, options)
    other, resumed, schedule_2 = make(fresh(dtype), 0.5)
    load(folder, other, resumed, options)
    schedule_2.load_state_dict(schedule.state_dict())
    assert_same_bits(states(other, resumed), states(model, optimizer))
    assert values(resumed) == values(optimizer)
    momentum = resumed.state[other.module.first.weight]["momentum_buffer"]
    assert momentum.dtype == (momentum_dtype or torch.float32)
    steps(model, optimizer, schedule, range(3, 5))
    steps(other, resumed, schedule_2, range(3, 5))
    assert_same_bits(weights(other), weights(model))
    assert_same_bits(states(other, resumed), states(model, optimizer))
    mine = torch.cat([p.float().flatten() for p in weights(other).values()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert_same_bits(both[0], both[1])


def read_state_before_the_first_step(dtype, lr, flatten):
    model = Model(dtype)
    untouched = copy.deepcopy(model)
    before = weights(model)
    optimizer = fmuon.FMuon(model, lr=lr, weight_decay=0.1)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    read = get_optimizer_state_dict(model, optimizer, options=options)
    assert_same_bits(weights(model), before)
    assert all(p.grad is None for p in model.parameters())
    for name, state in states(model, optimizer).items():
        moments = {"momentum_buffer"} if name in MATRICES else {"exp_avg", "exp_avg_sq"}
        assert set(state) == {"step", *moments}, name
        for key, value in state.items():
            assert value.count_nonzero() == 0, (name, key)
            saved = read[f"state.{name}.{key}"] if flatten else read["state"][name][key]
            assert_same_bits(saved, value)
    for group in optimizer.param_groups:
        assert type(group["lr"]) is type(lr) and group["lr"] == lr
    train(model, optimizer, [0])
    train(untouched, fmuon.FMuon(untouched, lr=lr, weight_decay=0.1), [0])
    assert_same_bits(weights(model), weights(untouched))


def resume_with_a_parameter_that_is_never_used(folder, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=True)
    idle = "second.weight", "norm.bias"
    model = Model()
    optimizer = fmuon.FMuon(model, lr=0.1)
    train(model, optimizer, range(2), idle)
    save(folder, model, optimizer, options)
    other = fresh()
    resumed = fmuon.FMuon(other, lr=0.5)
    load(folder, other, resumed, options)
    for name, p in other.named_parameters():
        assert resumed.state[p]["step"] == (0 if name in idle else 2), name
    # The first gradient of an idle parameter comes after the load: its count starts at 0.
    train(model, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert_same_bits(weights(other), weights(model))


def load_into_another_order(folder, flatten, exchanged):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = Model()
    optimizer = fmuon.FMuon(model.named_parameters(), lr=0.1)
    train(model, optimizer, range(2))
    save(folder, model, optimizer, options)
    other = fresh()
    named = dict(other.named_parameters())
    order = [exchanged.get(name, name) for name in named] if exchanged else reversed(named)
    resumed = fmuon.FMuon([(name, named[name]) for name in order], lr=0.1)
    load(folder, other, resumed, options)
    assert_same_bits(states(other, resumed), states(model, optimizer))
    train(model, optimizer, [2])
    train(other, resumed, [2])
    assert_same_bits(weights(other), weights(model))


def resume_three_groups(folder, flatten, named):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def make(model, rates, **values):
        groups = [[], [], []]
        for name, p in model.named_parameters():
            index = 0 if name in MATRICES else 1 if p.ndim == 2 else 2
            groups[index].append((name, p) if named else p)
        return fmuon.FMuon(
            [
                {"params": params, "use_muon": index == 0, "lr": lr, **values}
                for index, (params, lr) in enumerate(zip(groups, rates, strict=True))
            ]
        )

    model = Model()
    optimizer = make(model, (0.1, 0.02, 0.003), weight_decay=0.1)
    train(model, optimizer, range(2))
    save(folder, model, optimizer, options)
    other = fresh()
    resumed = make(other, (0.5, 0.5, 0.5))
    load(folder, other, resumed, options)
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.02, 0.003]
    assert values(resumed) == values(optimizer)
    train(model, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert_same_bits(weights(other), weights(model))


def resume_from_the_full_state_of_rank_0(dtype):
    get = StateDictOptions(full_state_dict=True, cpu_offload=True)
    put = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = Model(dtype)
    optimizer = fmuon.FMuon(model, lr=0.1, weight_decay=0.1)
    train(model, optimizer, range(2))
    whole = get_model_state_dict(model, options=get)
    state = get_optimizer_state_dict(model, optimizer, options=get)
    if dist.get_rank():
        assert not whole and not state
    other = fresh(dtype)
    resumed = fmuon.FMuon(other, lr=0.5)
    set_model_state_dict(other, whole, options=put)
    set_optimizer_state_dict(other, resumed, state, options=put)
    assert_same_bits(states(other, resumed), states(model, optimizer))
    assert values(resumed) == values(optimizer)
    train(model, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert_same_bits(weights(other), weights(model))


def resume_in_one_process(folder, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = Model()
    optimizer = fmuon.FMuon(model, lr=0.1, weight_decay=0.1)
    train(model, optimizer, range(2))
    save(folder, model, optimizer, options)
    if dist.get_rank() == 0:
        other = fresh()
        resumed = fmuon.FMuon(other, lr=0.5)
        load(folder, other, resumed, options, no_dist=True)
        train(model, optimizer, range(2, 4))
        train(other, resumed, range(2, 4))
        assert_same_bits(weights(other), weights(model))


# ---- tests ---------------------------------------------------------------------------------------


@FLATTEN
@FLOATS
@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16], ids=["default", "momentum16"])
def test_a_resumed_run_equals_an_uninterrupted_one(pair, tmp_path, dtype, momentum_dtype, flatten):
    pair(resume_data_parallel_training, tmp_path, dtype, momentum_dtype, flatten)


@FLATTEN
@FLOATS
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_reading_the_state_before_the_first_step_changes_nothing(pair, dtype, lr, flatten):
    pair(read_state_before_the_first_step, dtype, lr, flatten)


@FLATTEN
def test_a_parameter_that_is_never_used_loads_strictly(pair, tmp_path, flatten):
    pair(resume_with_a_parameter_that_is_never_used, tmp_path, flatten)


@FLATTEN
@pytest.mark.parametrize(
    "exchanged",
    [{"first.weight": "second.weight", "second.weight": "first.weight"}, {}],
    ids=["same_shapes", "reversed"],
)
def test_another_order_of_parameters_never_swaps_buffers(pair, tmp_path, flatten, exchanged):
    pair(load_into_another_order, tmp_path, flatten, exchanged)


@FLATTEN
@pytest.mark.parametrize("named", [True, False], ids=["named", "bare"])
def test_three_groups_keep_their_learning_rates(pair, tmp_path, flatten, named):
    pair(resume_three_groups, tmp_path, flatten, named)


@FLOATS
def test_the_full_state_of_rank_0_resumes_both_ranks(pair, dtype):
    pair(resume_from_the_full_state_of_rank_0, dtype)


@FLATTEN
def test_what_two_processes_saved_resumes_in_one(pair, tmp_path, flatten):
    pair(resume_in_one_process, tmp_path, flatten)
