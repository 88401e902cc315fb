# SPDX-License-Identifier: Apache-2.0
"""FMuon on models that torch shards, backward included, and their checkpoints."""

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import PRECISE, S0, assembled, located, mesh_of, put
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fmuon

TOLERANCE = 2e-6


class Net(nn.Module):
    """Sides of 5, 6 and 14: shards of unequal size, and of none."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 14)
        self.out = nn.Linear(14, 5)

    def forward(self, x):
        x = self.norm(self.down(self.up(self.embed(x)).relu()))
        return self.out(self.wide(x).relu())


def model():
    torch.manual_seed(3)
    return Net()


def data(step):
    return torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(step))


def sharded(kind, world):
    """(model, options, which part of the data is this rank's, in how many parts)."""
    net, rank = model(), dist.get_rank()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net), {"mesh": dist.group.WORLD}, rank, world
    layers = [net.up, net.down, net.wide, net.out]
    if kind == "tp":
        grid = mesh_of((world // 2, 2), ("data", "tensor"))
        parallelize_module(
            net, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        mesh, part, parts = grid["data"], grid["data"].get_local_rank(), world // 2
    else:
        mesh = mesh_of((world,)) if kind == "fsdp" else mesh_of((2, world // 2), ("copy", "shard"))
        part, parts = rank, world
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, {}, part, parts


def train(net, optimizer, part, parts, steps, spoiled=False):
    """Returns the gradients of every step; `spoiled`: those of step 2 aren't finite here."""
    given = []
    for step in steps:
        optimizer.zero_grad()
        net(data(step)[part::parts]).square().mean().backward()
        given.append({name: located(p.grad.clone()) for name, p in names(net).items()})
        if spoiled and step == 2:
            local(names(net)["up.weight"].grad).fill_(torch.inf)
        optimizer.step()
    return given


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def options(**changed):
    fixed = {"lr": 0.1, "weight_decay": 0.1, "orthogonalize": PRECISE, "compile": False}
    return {**fixed, **changed}


def names(net):
    return {name.removeprefix("module."): p for name, p in net.named_parameters()}


def trained(rank, world, kind, steps, spoiled_on=None, **changed):
    net, given, part, parts = sharded(kind, world)
    optimizer = fmuon.FMuon(net, **options(**given, **changed))
    grads = train(net, optimizer, part, parts, range(steps), rank == spoiled_on)
    return {"grads": grads, **outcome(net, optimizer)}


def outcome(net, optimizer):
    return {
        "params": {name: located(p.detach()) for name, p in names(net).items()},
        "placed": {
            name: tuple(map(str, p.placements))
            for name, p in names(net).items()
            if hasattr(p, "placements")
        },
        "steps": {name: float(optimizer.state[p]["step"]) for name, p in names(net).items()},
    }


def check(results, spoiled=False, **changed):
    """One process that is given the gradients of the ranks has the same result."""
    net = model()
    start = copy.deepcopy(net)
    optimizer = fmuon.FMuon(net, **options(**changed))
    for step in range(len(results[0]["grads"])):
        for name, p in net.named_parameters():
            parts = [result["grads"][step][name] for result in results]
            p.grad = assembled(p.shape, parts)
        if spoiled and step == 2:
            net.up.weight.grad.fill_(torch.inf)
        optimizer.step()
    for (name, p), old in zip(net.named_parameters(), start.parameters(), strict=True):
        whole = assembled(p.shape, [result["params"][name] for result in results])
        assert (whole - p).norm() <= TOLERANCE * (p - old).norm(), name
        assert {result["steps"][name] for result in results} == {float(optimizer.state[p]["step"])}


CASES = [
    ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tp", 4),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_models_train_as_in_one_process(kind, world):
    check(ranks.run(trained, world, kind, 4))


def test_tensor_parallel_layers_under_fsdp_have_the_layouts_that_are_meant():
    placed = ranks.run(trained, 4, "tp", 1)[0]["placed"]
    assert placed["up.weight"] == ("_S(0, 2)", "S(0)")
    assert placed["down.weight"] == ("S(0)", "S(1)")


AUXILIARIES = {"built in": fmuon.adamw(), "foreign": (torch.optim.AdamW, {"foreach": False})}


@pytest.mark.parametrize("auxiliary", AUXILIARIES)
@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("tp", 4)])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(kind, world, auxiliary):
    results = ranks.run(skipping, world, kind, auxiliary)
    check(results, spoiled=True, nonfinite="skip", auxiliary=AUXILIARIES[auxiliary])
    assert results[0]["steps"]["up.weight"] == 3


def skipping(rank, world, kind, auxiliary):
    changed = {"nonfinite": "skip", "auxiliary": AUXILIARIES[auxiliary]}
    return trained(rank, world, kind, 4, spoiled_on=world - 1, **changed)


# ---- gradients that some ranks lack --------------------------------------------------------------


def lopsided(rank, world, kind, lacking, compile=False):
    """Steps with given gradients, of which the last rank lacks some in the second."""
    torch.manual_seed(5)
    plain = {"a": torch.randn(4, 6), "b": torch.randn(6, 4), "c": torch.randn(4, 6)}
    params = {name: nn.Parameter(p.clone()) for name, p in plain.items()}
    mesh = dist.group.WORLD if kind == "ddp" else None
    if kind == "fsdp":
        params = {name: nn.Parameter(shard(p)) for name, p in plain.items()}
    optimizer = fmuon.FMuon(list(params.items()), **options(mesh=mesh, compile=compile))
    for step in range(3):
        for name, parameter in params.items():
            grad = torch.randn(plain[name].shape)
            parameter.grad = shard(grad) if kind == "fsdp" else grad
            if step == 1 and name == "b" and rank == world - 1:
                parameter.grad = None if lacking else torch.zeros_like(parameter)
            if step == 1 and name == "c":
                parameter.grad = None
        optimizer.step()
    return {
        "params": {name: located(p.detach()) for name, p in params.items()},
        "steps": {name: float(optimizer.state[p]["step"]) for name, p in params.items()},
    }


def shard(tensor):
    return put(tensor.detach(), (mesh_of((dist.get_world_size(),)), [S0]))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_gradient_that_one_rank_lacks_counts_as_zeros_there(kind):
    lacking, zeros = (ranks.run(lopsided, 2, kind, lacking) for lacking in (True, False))
    for mine, expected in zip(lacking, zeros, strict=True):
        assert mine["steps"] == expected["steps"] == {"a": 3, "b": 3, "c": 2}
        for name in mine["params"]:
            assert torch.equal(mine["params"][name][1], expected["params"][name][1])


def own_leaves(rank, world):
    """A sharded leaf, and a plain one of each rank that has a gradient at times."""
    torch.manual_seed(5)
    whole = torch.randn(6, 4)
    shared, own = nn.Parameter(shard(whole)), nn.Parameter(torch.randn(3, 5))
    optimizer = fmuon.FMuon([("shared", shared), ("own", own)], **options())
    for step in range(4):
        shared.grad = shard(torch.randn(6, 4))
        grad = torch.randn(3, 5)
        own.grad = grad if rank == 1 or step > 1 else None
        optimizer.step()
    return float(optimizer.state[shared]["step"]), float(optimizer.state[own]["step"])


def test_ranks_may_lack_gradients_of_leaves_of_their_own():
    assert ranks.run(own_leaves, 2) == [(4, 2), (4, 4)]


def uneven_experts(rank, world):
    """Ranks with more and with less of their own, beside large leaves that they share."""
    line = mesh_of((world,)), [S0]
    shapes = {"experts": (3, 1024, 512), **{f"w{i}": (512, 256) for i in range(9)}}
    torch.manual_seed(5)
    # From zero, so that the rounding of a weight is no part of what is compared.
    start = {path: torch.zeros(shape) for path, shape in shapes.items()}
    grads = {path: torch.randn(shape) for path, shape in shapes.items()}
    labels = {"experts": fmuon.Matrix(1, 2)}
    opt = fmuon.muon(0.1, labels=labels, orthogonalize=fmuon.NewtonSchulz(steps=1, dtype="float32"))
    params = {path: put(t, line) for path, t in start.items()}
    state = opt.init(params)
    fmuon.update_(opt, params, {path: put(t, line) for path, t in grads.items()}, state, 0)
    one = {path: t.clone() for path, t in start.items()}
    fmuon.update_(opt, one, grads, opt.init(one), 0)
    return max(
        float((params[p].full_tensor() - one[p]).norm() / (one[p] - start[p]).norm()) for p in one
    )


def test_in_place_buckets_of_shared_leaves_do_not_depend_on_what_a_rank_has_of_its_own():
    assert max(ranks.run(uneven_experts, 2)) < TOLERANCE


# ---- compiled ------------------------------------------------------------------------------------


def compiled_model(rank, world, kind):
    net, given, part, parts = sharded(kind, world)
    optimizer = fmuon.FMuon(net, **options(**given, compile="default"))
    grads = train(net, optimizer, part, parts, range(1))
    with torch.compiler.set_stance("fail_on_recompile"):
        grads += train(net, optimizer, part, parts, range(1, 4))
    return {"grads": grads, **outcome(net, optimizer)}


@pytest.mark.slow
def test_a_compiled_model_trains_as_in_one_process_with_one_graph():
    # Compiled too: the gradients are close to low rank, where the last bits of sums show.
    check(ranks.run(compiled_model, 2, "fsdp", timeout=200), compile="default")


# ---- checkpoints ---------------------------------------------------------------------------------


def saved(rank, world, folder):
    net, given, part, parts = sharded("fsdp", world)
    optimizer = fmuon.FMuon(net, **options(**given))
    train(net, optimizer, part, parts, range(3))
    state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def loaded(rank, world, kind, folder):
    net, given, part, parts = sharded(kind, world)
    optimizer = fmuon.FMuon(net, **options(**given))
    state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    before = {
        (name, slot): located(tensor.detach().clone())
        for name, p in names(net).items()
        for slot, tensor in optimizer.state[p].items()
    }
    train(net, optimizer, part, parts, range(3, 4))
    return before, {name: located(p.detach()) for name, p in names(net).items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("dcp"))
    ranks.run(saved, 2, folder)
    return folder


def resumed(kind, world, folder):
    results = ranks.run(loaded, world, kind, folder)
    net = model()
    sizes = {name: p.shape for name, p in net.named_parameters()}
    before = {
        (name, slot): assembled(
            () if slot == "step" else sizes[name], [result[0][name, slot] for result in results]
        )
        for name, slot in results[0][0]
    }
    after = {
        name: assembled(sizes[name], [result[1][name] for result in results]) for name in sizes
    }
    return before, after


@pytest.mark.parametrize(
    ("kind", "world"), [("fsdp", 1), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tp", 4)]
)
def test_a_distributed_checkpoint_loads_at_any_world_size_and_layout(checkpoint, kind, world):
    before, after = resumed(kind, world, checkpoint)
    expected, following = resumed("fsdp", 2, checkpoint)
    assert before.keys() == expected.keys()
    assert any(slot == "momentum_buffer" for _, slot in before)
    for key, tensor in before.items():
        assert torch.equal(tensor, expected[key]), key
    for name, tensor in after.items():
        assert (tensor - following[name]).norm() <= TOLERANCE * following[name].norm()
