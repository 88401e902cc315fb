# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.testing import assert_close

import fmuon


def trained():
    params = {
        "embed": torch.randn(6, 3),
        "old": torch.randn(4, 3),
        "gone": torch.randn(3, 3),
        "b": torch.randn(4),
    }
    opt = fmuon.muon(0.1)
    state = opt.init(params)
    for step in range(3):
        _, state = opt.update({k: torch.randn_like(p) for k, p in params.items()}, state, step)
    return opt, params, state


def test_leaves_go_on_join_end_and_grow():
    opt, params, state = trained()
    changed = {
        "embed": torch.randn(8, 3),
        "new": params["old"],
        "joined": torch.randn(5, 5),
        "b": params["b"],
    }
    adapted = fmuon.adapt_state(
        opt, state, changed, 3, rename={"old": "new"}, drop=["gone"], add=["joined"],
        resize=["embed"],
    )  # fmt: skip
    assert adapted["momentum"]["new"] is state["momentum"]["old"]
    assert adapted["missed"]["joined"] == 3 and adapted["missed"]["new"] == 0
    mu = adapted["auxiliary"]["mu"]["embed"]
    assert torch.equal(mu[:6], state["auxiliary"]["mu"]["embed"]) and not mu[6:].any()
    grads = {k: torch.randn_like(p) for k, p in changed.items()}
    updates, _ = opt.update(grads, adapted, 3)
    plain, _ = opt.update(
        {"embed": grads["embed"][:6], "old": grads["new"], "gone": None, "b": grads["b"]}, state, 3
    )
    assert_close(updates["new"], plain["old"])
    assert_close(updates["b"], plain["b"])
    fresh, _ = opt.update({"joined": grads["joined"]}, opt.init({"joined": grads["joined"]}), 0)
    assert_close(updates["joined"], fresh["joined"])


def test_all_that_is_undeclared_or_declared_in_vain_is_listed():
    opt, params, state = trained()
    changed = {"embed": torch.randn(8, 3), "new": params["old"], "b": params["b"]}
    with pytest.raises(fmuon.StateError) as caught:
        fmuon.adapt_state(opt, state, changed, 3, add=["b", "x"], drop=["y"], resize=["z"])
    assert_expected_inline(
        str(caught.value),
        """state and model don't match; in the model but not in the state (declare in add or rename): ['new']; in the state but not in the model (declare in drop or rename): ['gone', 'old']; added, but the state has them: ['b']; added, but not in the model: ['x']; dropped or renamed, but not in the state: ['y']; resized, but not kept: ['z']; of another shape (declare in resize, if only the rows differ): ['embed (6, 3) -> (8, 3)']""",
    )
    with pytest.raises(fmuon.StateError, match=r"embed \(6, 3\) -> \(6, 4\)"):
        fmuon.adapt_state(opt, state, params | {"embed": torch.randn(6, 4)}, 3, resize=["embed"])


def test_a_changed_label_needs_a_fresh_start():
    _, params, state = trained()
    other = fmuon.muon(labels={"old": "auxiliary"})
    with pytest.raises(fmuon.StateError, match=r"'old': needs auxiliary\.mu.*drop.*add"):
        fmuon.adapt_state(other, state, params, 3)
    adapted = fmuon.adapt_state(other, state, params, 3, drop=["old"], add=["old"])
    assert "old" in adapted["auxiliary"]["mu"]


def model(rows, name):
    layers = {"embed": nn.Embedding(rows, 4), name: nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    return nn.ModuleDict(layers)


def test_an_optimizer_loads_the_state_of_a_changed_model():
    before, after = model(6, "body"), model(9, "trunk")
    after["extra"] = nn.Linear(4, 4, bias=False)
    optimizer = fmuon.FMuon(before, lr=0.1)
    for p in before.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    other = fmuon.FMuon(after, lr=0.1)
    state_dict = optimizer.state_dict()
    with pytest.raises(fmuon.StateError, match=r"\['extra.weight', 'trunk.bias', 'trunk.weight'\]"):
        other.load_state_dict(state_dict)
    assert not other.state
    other.load_state_dict(
        state_dict,
        rename={"body.weight": "trunk.weight", "body.bias": "trunk.bias"},
        add=["extra.weight"],
        resize=["embed.weight"],
    )
    old, new = optimizer.state[before["body"].weight], other.state[after["trunk"].weight]
    assert torch.equal(old["momentum_buffer"], new["momentum_buffer"]) and new["step"] == 1
    rows = other.state[after["embed"].weight]["exp_avg"]
    assert torch.equal(rows[:6], optimizer.state[before["embed"].weight]["exp_avg"])
    assert not rows[6:].any()
    for p in after.parameters():
        p.grad = torch.randn_like(p)
    other.step()
    assert other.state[after["extra"].weight]["step"] == 1 and new["step"] == 2
