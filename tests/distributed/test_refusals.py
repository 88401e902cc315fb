# SPDX-License-Identifier: Apache-2.0
"""What can't be done with shards is refused by name, on all ranks; nobody waits for ever."""

import os
import re
import signal

import pytest
import ranks
import torch
import torch.distributed as dist
from layouts import S0, S1, R, mesh_of, put
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import fmuon


def message_of(rank, world, case):
    """The error that a call raises on this rank."""
    try:
        CASES[case](rank, (mesh_of((world,)), [S0]))
    except fmuon.FMuonError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def draw(where, shape=(4, 6)):
    return put(torch.ones(shape), where)


def partial(mesh):
    return DTensor.from_local(torch.ones(4, 6), mesh, [Partial()], run_check=False)


def partial_param(rank, where):
    fmuon.init({"w": partial(where[0])})


def partial_grad(rank, where):
    params = {"w": draw(where)}
    fmuon.update({"w": partial(where[0])}, fmuon.init(params), 0, params)


def other_grad(rank, where):
    params = {"w": draw(where)}
    fmuon.update({"w": draw((where[0], [S1]))}, fmuon.init(params), 0, params)


def plain_grad(rank, where):
    params = {"w": draw(where)}
    fmuon.update({"w": torch.ones(4, 6)}, fmuon.init(params), 0, params)


def replicated_state(rank, where):
    params = {"w": draw(where)}
    fmuon.update(params, fmuon.init({"w": draw((where[0], [R]))}), 0, params)


class FlatParameter(nn.Parameter):
    """Named as FSDP1's, by which it is known."""


def flat_parameter(rank, where):
    fmuon.FMuon([("w", FlatParameter(torch.ones(24)))])


def unequal_shapes(rank, where):
    opt = fmuon.muon(mesh=dist.group.WORLD)
    opt.init({"same": torch.ones(3, 3), "w": torch.ones(4, 6 + rank)})


def unequal_names(rank, where):
    fmuon.muon(mesh=dist.group.WORLD).init({f"w{rank}": torch.ones(4, 6)})


def unequal_options(rank, where):
    fmuon.muon(missing=["skip", "zero"][rank]).init({"w": draw(where)})


def unequal_optimizers(rank, where):
    parameter = nn.Parameter(draw(where))
    parameter.grad = draw(where)
    fmuon.FMuon([("w", parameter)], lr=0.1, missing=["skip", "zero"][rank], compile=False).step()


def no_mesh(rank, where):
    fmuon.muon(mesh=2)


def offloaded(rank, where):
    """A shard that is not on the devices of its mesh; another device than a CPU is not needed."""
    whole = draw(where)
    shard = DTensor(whole.to_local().to("meta"), whole._spec, requires_grad=False)
    fmuon.init({"w": shard})


def no_number_of_ranks(rank, where):
    fmuon.explain({"w": torch.ones(4, 6)}, mesh=(2, 0))


CASES = {
    function.__name__: function
    for function in (
        partial_param, partial_grad, other_grad, plain_grad, replicated_state, flat_parameter,
        unequal_shapes, unequal_names, unequal_options, unequal_optimizers, no_mesh, offloaded,
        no_number_of_ranks,
    )
}  # fmt: skip
for option, value in {
    "metrics": ("update_rms",),
    "differentiable": True,
}.items():
    CASES[option] = lambda rank, where, given={option: value}: fmuon.muon(**given).init(
        {"w": draw(where)}
    )
    CASES[f"{option} of experts"] = lambda rank, where, given={option: value}: fmuon.muon(
        labels={"w": fmuon.Matrix(1, 2)}, **given
    ).init({"w": draw(where, (4, 3, 5))})

CASES["adaptive of experts"] = lambda rank, where: fmuon.muon(
    adaptive=True, labels={"w": fmuon.Matrix(1, 2)}
).init({"w": draw(where, (4, 3, 5))})
EXPECTED = {
    "adaptive of experts": r"'w' is a stack of matrices that is sharded along the stack, and adap",
    "partial_param": r"LeafError: 'w': placement P.*redistribute it to Shard or Replicate",
    "partial_grad": r"LeafError: 'w': placement P.*redistribute it to Shard or Replicate",
    "other_grad": r"LeafError: 'w': gradient is sharded as shards of axis 1 .*shards of axis 0",
    "plain_grad": r"LeafError: 'w': gradient is sharded as a plain tensor, state as shards of",
    "replicated_state": r"LeafError: 'w': .*shards of axis 0 .*a replica",
    "flat_parameter": r"LeafError: 'w': a flattened shard .*fully_shard",
    "unequal_shapes": r"StateError: the ranks \[0, 1\] disagree.*w: \(4, 6\).*w: \(4, 7\)",
    "unequal_names": r"StateError: the ranks \[0, 1\] disagree.*w0.*w1",
    "unequal_options": r"StateError: the ranks \[0, 1\] disagree.*skip.*zero",
    "unequal_optimizers": r"StateError: the ranks \[0, 1\] disagree.*skip.*zero",
    "no_mesh": r"ConfigurationError: mesh=2: give a DeviceMesh or a process group",
    "offloaded": r"LeafError: 'w': its shards are on meta, its mesh on 'cpu'; offloaded param",
    "no_number_of_ranks": r"ConfigurationError: mesh=\(2, 0\): give a number of ranks, \(replicas",
    **{
        name: rf"ConfigurationError: 'w' is shared among the ranks \[0, 1\], and {option}="
        for option in ("metrics", "differentiable")
        for name in (option, f"{option} of experts")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_done_is_refused_by_name_on_all_ranks(case):
    for message in ranks.run(message_of, 2, case):
        assert re.search(EXPECTED[case], message), message


def counting_skips(rank, world):
    opt = fmuon.muon(0.1, nonfinite="skip", metrics=("skipped_steps",))
    where = mesh_of((world,)), [S0]
    params = {"w": draw(where)}
    _, state = opt.update({"w": draw(where) * torch.inf}, opt.init(params), 0, params)
    return state["metrics"]


def test_skipped_steps_of_shards_are_counted():
    for metrics in ranks.run(counting_skips, 2):
        assert metrics == {"fmuon/skipped_steps": 1}


def unprepared(rank, world, prepares):
    """A compiled update with a state from elsewhere, in a process that knows no mesh yet."""
    where = mesh_of((world,)), [S0]
    opt = fmuon.muon(0.1)
    params = {"w": draw(where)}
    state = {
        "momentum": {"w": draw(where) * 0},
        "auxiliary": {"mu": {}, "nu": {}},
        "missed": {"w": torch.zeros((), dtype=torch.int64)},
    }
    if prepares:
        fmuon.distributed.prepare(opt, params)
    update = fmuon.compile(opt.update, backend="aot_eager")
    try:
        return update({"w": draw(where)}, state, 0, params)[0]["w"].to_local().shape
    except fmuon.ConfigurationError as error:
        return str(error)


def test_a_compiled_update_without_preparation_says_what_to_call():
    for message in ranks.run_fresh(unprepared, 2, False):
        assert "call fmuon.distributed.prepare(opt, params) on all ranks" in message


def test_a_compiled_update_of_a_loaded_state_runs_after_preparation():
    assert ranks.run_fresh(unprepared, 2, True) == [(2, 6), (2, 6)]


# ---- one process, two worlds ---------------------------------------------------------------------


def second_life(rank, world, folder):
    """The same update before and after the process groups are destroyed and made anew."""
    found = []
    for life in range(2):
        if life:
            dist.destroy_process_group()
            store = dist.FileStore(f"{folder}/store", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            # Names are given in turn, so that they mean other groups now.
            dist.new_group([0, 1])
        where = init_device_mesh("cpu", (2, 2)), [R, S0]
        params = {"w": put(torch.arange(24.0).view(4, 6).sin(), where)}
        opt = fmuon.muon(0.1)
        updates, _ = opt.update(params, opt.init(params), 0, params)
        found.append(updates["w"].to_local())
    return found


def test_groups_of_a_world_that_ended_are_forgotten(tmp_path):
    for first, second in ranks.run_fresh(second_life, 4, str(tmp_path)):
        assert torch.equal(first, second)


# ---- clipping ------------------------------------------------------------------------------------


def clipped(rank, world):
    line = mesh_of((world,))
    grads = {"a": draw((line, [S0])), "b": draw((line, [R]), (5, 3)), "c": torch.ones(3)}
    tree, norm = fmuon.clip_by_global_norm(grads, 1.0)
    local = {path: t.to_local() if hasattr(t, "to_local") else t for path, t in tree.items()}
    return norm, {path: float(t.flatten()[0]) for path, t in local.items()}


def test_the_global_norm_is_that_of_shards_and_plain_tensors_together():
    for norm, entries in ranks.run(clipped, 2):
        assert float(norm) == pytest.approx(42**0.5)
        assert entries == pytest.approx(dict.fromkeys("abc", 42**-0.5))


# ---- ranks that fail -----------------------------------------------------------------------------


def killed(rank, world, by):
    where = mesh_of((world,)), [S0]
    params = {"w": draw(where)}
    opt = fmuon.muon(0.1)
    state = opt.init(params)
    for step in range(3):
        if step == 1 and rank == world - 1:
            by()
        _, state = opt.update({"w": draw(where)}, state, step, params)


def by_signal():
    os.kill(os.getpid(), signal.SIGKILL)


def by_error():
    raise ValueError("out of data")


def test_a_rank_that_is_killed_ends_the_others_with_an_error():
    with pytest.raises(ranks.RankError) as raised:
        ranks.run_fresh(killed, 3, by_signal, timeout=5)
    errors = raised.value.errors
    assert errors.keys() == {0, 1, 2}
    assert errors[2] == f"ended with exit code {-signal.SIGKILL}"
    for rank in (0, 1):
        assert "silent" not in errors[rank]
        assert "RuntimeError" in errors[rank] or "DistBackendError" in errors[rank]


def test_a_rank_that_raises_leaves_the_others_waiting_no_longer_than_the_timeout():
    with pytest.raises(ranks.RankError) as raised:
        ranks.run_fresh(killed, 2, by_error, timeout=5)
    errors = raised.value.errors
    assert "ValueError: out of data" in errors[1]
    assert "RuntimeError" in errors[0] or "DistBackendError" in errors[0]
