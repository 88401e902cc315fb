# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other optimizers; tests/parity has those whose packages are extras."""

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from strategies import refusal
from torch.testing import assert_close

import fmuon
from fmuon import interop
from fmuon.interop import FORMATS

SHAPES = {"tall": (9, 4), "wide": (4, 9), "bias": (5,), "other": (4, 4)}
MATRICES, OTHERS = ["tall", "wide", "other"], ["bias"]


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=generator) for k, s in SHAPES.items()}


def gradients(step):
    return weights(100 + step)


def trained(opt, params, state, steps):
    for step in steps:
        updates, state = opt.update(gradients(step), state, step, params)
        params = fmuon.apply_updates(params, updates)
    return params, state


# ---- torch.optim.Muon and AdamW ------------------------------------------------------------------


class Pair:
    """Muon for the matrices, in an order of its own, and AdamW for the rest."""

    names = ([*reversed(MATRICES)], OTHERS)

    def __init__(self, params):
        self.params = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
        muon, adam = ([self.params[k] for k in names] for names in self.names)
        self.muon = torch.optim.Muon(muon, lr=0.01, weight_decay=0.1)
        self.adam = torch.optim.AdamW(adam, lr=0.01, weight_decay=0.1)

    def run(self, steps):
        for step in steps:
            for k, grad in gradients(step).items():
                self.params[k].grad = grad
            self.muon.step()
            self.adam.step()
        return {k: p.detach().clone() for k, p in self.params.items()}


def torch_opt():
    return fmuon.presets.torch(0.01, weight_decay=0.1)


def close(ours, theirs, start, bound=3e-2):
    """Products in bfloat16 on both sides."""
    for k, begin in start.items():
        assert (ours[k] - theirs[k]).norm() <= bound * (theirs[k] - begin).norm(), k


def test_goes_on_from_torch():
    pair, params = Pair(weights()), weights()
    halfway = pair.run(range(10))
    saved = [pair.muon.state_dict(), pair.adam.state_dict()]
    state, step = interop.read(saved, torch_opt(), params, format="torch", names=Pair.names)
    assert step == 10
    assert_close(state["momentum"]["wide"], pair.muon.state[pair.params["wide"]]["momentum_buffer"])
    ours, _ = trained(torch_opt(), halfway, state, range(10, 20))
    close(ours, pair.run(range(10, 20)), params)


def test_torch_goes_on_from_ours():
    params, opt = weights(), torch_opt()
    halfway, state = trained(opt, params, opt.init(params), range(10))
    pair = Pair(halfway)
    for optimizer, names in zip((pair.muon, pair.adam), Pair.names, strict=True):
        like = optimizer.state_dict()
        optimizer.load_state_dict(interop.write(state, 10, like, format="torch", names=names))
    assert pair.adam.state[pair.params["bias"]]["step"] == 10
    ours, _ = trained(opt, halfway, state, range(10, 20))
    close(ours, pair.run(range(10, 20)), params)


def test_a_muon_without_a_count_takes_the_step_of_the_caller():
    pair, opt = Pair(weights()), fmuon.muon(labels=dict.fromkeys(OTHERS, "frozen"))
    pair.run(range(3))
    params = {k: p for k, p in weights().items() if k in MATRICES}
    read = functools.partial(
        interop.read, pair.muon.state_dict(), opt, params, format="torch", names=Pair.names[0]
    )
    assert read()[1] == 0
    state, step = read(step=3)
    assert step == 3 and all(missed == 0 for missed in state["missed"].values())


# ---- fmuon.FMuon ---------------------------------------------------------------------------------


def test_from_the_pure_functions_to_fmuon_and_back():
    params, opt = weights(), fmuon.muon(0.01, second_moment="normuon")
    params, state = trained(opt, params, opt.init(params), range(5))
    own = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
    optimizer = fmuon.FMuon(own.items(), lr=0.01, second_moment="normuon")
    like = optimizer.state_dict()
    optimizer.load_state_dict(interop.write(state, 5, like, format="fmuon"))
    back, step = interop.read(optimizer.state_dict(), opt, params, format="fmuon")
    assert step == 5
    assert_close(back, state, rtol=0, atol=0)
    for k, grad in gradients(5).items():
        own[k].grad = grad
    optimizer.step()
    ours, _ = trained(opt, params, state, range(5, 6))
    for k, p in own.items():
        assert_close(p.detach(), ours[k], rtol=1e-6, atol=1e-7)


# ---- every format --------------------------------------------------------------------------------


def test_codes_and_mantissas_go_from_the_pure_functions_to_fmuon_and_back():
    options = {"momentum_dtype": "fp8", "master": "mantissa", "lr": 1e-3}
    opt = fmuon.muon(**options, labels={"re:" + "|".join(MATRICES): "muon"})
    params = {k: p.bfloat16() for k, p in weights().items()}
    params, state = trained(opt, params, opt.init(params), range(3))
    module = torch.nn.ParameterDict({k: torch.nn.Parameter(p) for k, p in params.items()})
    shim = fmuon.FMuon(module, **options, labels={"re:" + "|".join(MATRICES): "muon"})
    written = interop.write(state, 3, shim.state_dict(), format="fmuon")
    shim.load_state_dict(written)
    assert shim.state[module["bias"]].keys() == {"exp_avg", "exp_avg_sq", "mantissa", "step"}
    again, step = interop.read(shim.state_dict(), opt, params, format="fmuon")
    assert step == 3
    assert_close(again, state, rtol=0, atol=0)
    with pytest.raises(fmuon.StateError, match="has no place for 'momentum_scale'"):
        interop.write(state, 3, format="optax")


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_is_read_again(format):
    params, opt = weights(), fmuon.muon(0.01)
    late = {**opt.init(params)}
    params, state = trained(opt, params, late, range(4))
    names = [*reversed(SHAPES)]
    group = {"params": [0, 1, 2, 3], "mu": 0.9, "momentum": 0.9, "lr": 0.1}
    like = {"state": {}, "param_groups": [group]}
    saved = interop.write(state, 4, like, format=format, names=names)
    back, step = interop.read(saved, opt, params, format=format, names=names, step=4)
    assert step == 4
    assert_close(back, state, rtol=1e-6, atol=0)
    if FORMATS[format].sums:
        kept = saved["state"][names.index("tall")]
        sums = kept[FORMATS[format].matrices.keys["momentum"]]
        assert_close(sums, state["momentum"]["tall"] * 10, rtol=1e-5, atol=0)


def test_momentum_of_several_ranks_is_gathered():
    params = {k: p for k, p in weights().items() if k in MATRICES}
    names = interop.by_size(params)
    assert names == ["tall", "wide", "other"]
    groups = [{"params": [0, 1, 2], "lr": 0.1}]
    ranks = [
        {"state": {i: {"momentum_buffer": torch.full(params[names[i]].shape, float(i))}},
         "param_groups": groups}
        for i in range(3)
    ]  # fmt: skip
    opt = fmuon.presets.jordan()
    state, _ = interop.read(ranks, opt, params, format="muon_optimizer", names=names)
    assert [float(state["momentum"][k].mean()) for k in names] == [0, 1, 2]


def test_a_leaf_that_joined_late_keeps_its_count():
    params, opt = weights(), fmuon.muon(0.01)
    state = opt.init(params)
    state["missed"]["bias"] += 3
    saved = interop.write(state, 4, _like(), format="torch", names=[*SHAPES])
    assert saved["state"][2]["step"] == 1
    back, _ = interop.read(saved, opt, params, format="torch", names=[*SHAPES], step=4)
    assert back["missed"]["bias"] == 3 and back["missed"]["tall"] == 0


def _like():
    return {"state": {}, "param_groups": [{"params": [0, 1, 2, 3]}]}


# ---- errors --------------------------------------------------------------------------------------


def test_errors_name_the_leaf():
    params, opt = weights(), fmuon.muon(0.01)
    state = opt.init(params)
    names = [*SHAPES]
    saved = interop.write(state, 4, _like(), format="torch", names=names)
    fewer = {**saved, "state": {0: saved["state"][0]}}
    read = functools.partial(interop.read, opt=opt, params=params, format="torch")
    frozen = fmuon.muon(labels={"tall": "auxiliary"})
    normuon = fmuon.muon(second_moment="normuon")
    assert_expected_inline(
        "\n".join(
            refusal(fmuon.FMuonError, function)
            for function in (
                lambda: read(saved),
                lambda: read(saved, names=names[:3]),
                lambda: read(saved, names=["wide", "tall", "bias", "other"]),
                lambda: read(saved, names=["tail", "wide", "bias", "other"]),
                lambda: read(fewer, names=names),
                lambda: read(fewer, names=names, add=["wide", "bias", "other", "tall", "new"]),
                lambda: read(saved, names=names, opt=frozen),
                lambda: read(saved, names=names, opt=normuon),
                lambda: read(saved, names=names, format="keras"),
                lambda: interop.write(normuon.init(params), 4, _like(), format="moonlight",
                                      names=names),
                lambda: interop.write(state, 4, _like(), format="torch", names=[*names[:3], "x"]),
            )
        ),
        """\
the state_dict numbers its parameters and has no param_names; give names=, the
paths in the order of its param_groups
3 names for the 4 parameters of the state_dict
'tall': 'momentum_buffer' of shape (4, 9) in the checkpoint, opt keeps (9, 4);
are the names in the order of the state_dict?
not in the checkpoint: ['tall']; no leaves of params: ['tail']. Name what the
checkpoint lacks in add=, and check the names
not in the checkpoint: ['bias', 'other', 'wide']. Name what the checkpoint lacks
in add=, and check the names
added, but in the checkpoint: ['tall']; added, but no leaves that are trained:
['new']. Name what the checkpoint lacks in add=, and check the names
'tall': opt keeps ['mu', 'nu'] for it, the checkpoint ['momentum_buffer']; label
it in opt as the other optimizer trained it
'tall': opt keeps ['momentum', 'second_moment'] for it, the checkpoint
['momentum_buffer']; label it in opt as the other optimizer trained it
unknown format 'keras'; known: 'torch', 'muon_optimizer', 'dion', 'moonlight',
'optax', 'fmuon'
a group of the state_dict says no 'momentum', by which its momentum is summed;
it has ['params']
names: the state holds nothing of ['x']""",
    )  # fmt: skip


def test_what_the_checkpoint_lacks_starts_afresh_when_declared():
    params, opt = weights(), fmuon.muon(0.01)
    params, state = trained(opt, params, opt.init(params), range(4))
    saved = interop.write(state, 4, _like(), format="torch", names=[*SHAPES])
    del saved["state"][1]
    back, _ = interop.read(
        saved, opt, params, format="torch", names=[*SHAPES], step=4, add=["wide"]
    )
    assert not back["momentum"]["wide"].any() and back["missed"]["wide"] == 4
    assert_close(back["momentum"]["tall"], state["momentum"]["tall"], rtol=0, atol=0)


def test_a_leaf_of_the_other_kind_is_refused_where_both_have_one_key():
    params, opt = weights(), fmuon.muon(0.01)
    other = fmuon.muon(0.01, labels={"tall": "auxiliary"})
    group = {"params": [0, 1, 2, 3], "mu": 0.9}
    for format in ("dion", "optax"):
        like = {"state": {}, "param_groups": [group]}
        names = [*SHAPES]
        saved = interop.write(other.init(params), 4, like, format=format, names=names)
        with pytest.raises(fmuon.StateError, match="'tall'"):
            interop.read(saved, opt, params, format=format, names=names, step=4)


def test_what_a_format_cannot_hold_or_needs_is_refused():
    params = weights()
    lion = fmuon.muon(auxiliary=fmuon.lion())
    normuon = fmuon.muon(second_moment="normuon")
    for opt, format in ((lion, "torch"), (lion, "optax"), (normuon, "torch"), (normuon, "optax")):
        with pytest.raises(fmuon.StateError):
            interop.write(opt.init(params), 4, _like(), format=format, names=[*SHAPES])
    halved = fmuon.presets.optax(mu_dtype=torch.bfloat16)
    saved = interop.write(halved.init(params), 3, format="optax")
    assert saved["muon"]["mu"]["tall"].dtype == "float32"
