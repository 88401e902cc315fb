# SPDX-License-Identifier: Apache-2.0
"""Ten steps of another optimizer and ten of ours are twenty of the other, and the reverse."""

import cases
import numpy as np
import problems
import pytest
import torch
from agreement import differences, run, run_torch, tensors

import fmuon
from fmuon import interop

SHAPES = problems.MATRICES | problems.OTHERS
FIRST, SECOND = range(10), range(10, 20)


def check(ours, theirs, shapes=SHAPES, bound=cases.FLOAT32):
    found = differences(ours, theirs, tensors(problems.weights(shapes)))
    beyond = {leaf: f for leaf, f in found.items() if not f.value <= bound + f.rounding}
    assert found and not beyond, beyond


# ---- muon-optimizer ------------------------------------------------------------------------------


def jordan(params):
    """In an order of its own, hidden matrices first."""
    hidden = [params[k] for k in reversed(problems.MATRICES)]
    others = [params[k] for k in problems.OTHERS]
    return cases.muon_optimizer("float32").SingleDeviceMuonWithAuxAdam(
        [
            {"params": hidden, "use_muon": True, "weight_decay": 0.1},
            {"params": others, "use_muon": False},
        ]
    )


JORDAN_NAMES = [*reversed(problems.MATRICES), *problems.OTHERS]


def jordan_opt():
    options = cases.in_dtype("jordan", "float32", weight_decay=0.1)
    return fmuon.presets.jordan(labels=cases.is_matrix, **options)


def test_goes_on_from_muon_optimizer_and_back():
    whole, _ = run_torch(jordan, SHAPES)
    half, theirs = run_torch(jordan, SHAPES, steps=FIRST)
    state, step = interop.read(
        theirs.state_dict(), jordan_opt(), half, format="muon_optimizer", names=JORDAN_NAMES
    )
    assert step == 10
    ours, state = run(jordan_opt(), SHAPES, steps=SECOND, start=half, state=state)
    check(ours, whole)
    # The reverse: ten of ours first.
    half, state = run(jordan_opt(), SHAPES, steps=FIRST)
    saved = interop.write(
        state, 10, theirs.state_dict(), format="muon_optimizer", names=JORDAN_NAMES
    )
    theirs, _ = run_torch(jordan, SHAPES, steps=SECOND, start=half, saved=saved)
    check(theirs, whole)


def test_owner_only_momentum_of_two_ranks():
    """What each rank of the distributed form saves: momentum of every other matrix of its order."""
    single = cases.muon_optimizer("float32").SingleDeviceMuon
    names = interop.by_size(tensors(problems.weights(problems.MATRICES)))

    def make(params):
        return single([params[k] for k in names], lr=0.02)

    whole, _ = run_torch(make, problems.MATRICES)
    half, theirs = run_torch(make, problems.MATRICES, steps=FIRST)
    saved = theirs.state_dict()
    ranks = [
        {**saved, "state": {i: s for i, s in saved["state"].items() if i % 2 == rank}}
        for rank in range(2)
    ]
    options = cases.in_dtype("jordan", "float32")
    opt = fmuon.presets.jordan(labels=cases.is_matrix, **options)
    state, step = interop.read(ranks, opt, half, format="muon_optimizer", names=names, step=10)
    assert step == 10
    ours, _ = run(opt, problems.MATRICES, steps=SECOND, start=half, state=state)
    check(ours, whole, problems.MATRICES)


# ---- torch.optim.Muon ----------------------------------------------------------------------------


def torch_muon(params):
    params = {name: params[name] for name in problems.MATRICES}
    return cases.torch_muon("float32", {}, params)


def test_goes_on_from_torch_and_back():
    shapes, names = problems.MATRICES, [*problems.MATRICES]
    options = cases.in_dtype("torch", "float32")
    opt = fmuon.presets.torch(cases.LR, labels=cases.is_matrix, **options)
    whole, _ = run_torch(torch_muon, shapes)
    half, theirs = run_torch(torch_muon, shapes, steps=FIRST)
    like = theirs.state_dict()
    state, _ = interop.read(like, opt, half, format="torch", names=names, step=10)
    ours, _ = run(opt, shapes, steps=SECOND, start=half, state=state)
    check(ours, whole, shapes)
    half, state = run(opt, shapes, steps=FIRST)
    saved = interop.write(state, 10, like, format="torch", names=names)
    back, _ = run_torch(torch_muon, shapes, steps=SECOND, start=half, saved=saved)
    check(back, whole, shapes)


# ---- optax ---------------------------------------------------------------------------------------


def arrays_of(state):
    """The state of optax.contrib.muon as the dict of arrays that interop reads."""
    muon = state.inner_states["muon"].inner_state[0]
    adam = state.inner_states["adam"].inner_state[0]
    parts = {"muon": {"mu": muon.mu}, "adam": {"mu": adam.mu, "nu": adam.nu}}
    saved = {
        part: {k: {p: np.asarray(a) for p, a in tree.items() if hasattr(a, "shape")}
               for k, tree in trees.items()}
        for part, trees in parts.items()
    }  # fmt: skip
    for part, inner in (("muon", muon), ("adam", adam)):
        saved[part]["count"] = np.asarray(inner.count)
    return saved


def state_of(saved, like):
    """The reverse: the arrays in a fresh state of optax."""
    import jax.numpy as jnp

    inner = {}
    for part, masked in like.inner_states.items():
        first, *rest = masked.inner_state
        changes = {"count": jnp.asarray(saved[part]["count"], dtype=jnp.int32)}
        for key in saved[part].keys() - {"count"}:
            tree = getattr(first, key)
            changes[key] = {
                p: jnp.asarray(saved[part][key][p]) if p in saved[part][key] else node
                for p, node in tree.items()
            }
        inner[part] = masked._replace(inner_state=(first._replace(**changes), *rest))
    return like._replace(inner_states=inner)


def test_goes_on_from_optax_and_back():
    jax = pytest.importorskip("jax", reason="the extra `parity` is not installed")
    import jax.numpy as jnp

    with jax.enable_x64(True):
        tx = cases.optax_muon(cases.LR)
        whole, _ = cases.run_optax(tx, SHAPES)
        half, theirs = cases.run_optax(tx, SHAPES, steps=FIRST)
        opt = fmuon.presets.optax(cases.LR)
        state, step = interop.read(arrays_of(theirs), opt, half, format="optax")
        assert step == 10
        ours, _ = run(opt, SHAPES, steps=SECOND, start=half, state=state)
        check(ours, whole)
        half, state = run(opt, SHAPES, steps=FIRST)
        saved = interop.write(state, 10, format="optax")
        fresh = tx.init({k: jnp.asarray(v) for k, v in problems.weights(SHAPES).items()})
        start = {k: v.numpy() for k, v in half.items()}
        back, _ = cases.run_optax(
            tx, SHAPES, steps=SECOND, start=start, state=state_of(saved, fresh)
        )
        check(back, whole)


# ---- those that are on no registry: what they saved after ten steps, and where twenty ended ------


@pytest.mark.parametrize("name", ["dion-muon", "dion-normuon", "normuon", "moonlight"])
def test_goes_on_from_a_recorded_checkpoint(name):
    record = cases.golden("checkpoints")[name]
    preset, shapes = record["preset"], {k: tuple(s) for k, s in record["shapes"].items()}
    half, whole = (_unpacked(record[part], shapes) for part in ("half", "whole"))
    saved = {
        "state": {
            int(i): {k: _value(v) for k, v in held.items()}
            for i, held in record["saved"]["state"].items()
        },
        "param_groups": record["saved"]["param_groups"],
    }
    options = cases.in_dtype(preset, "float32", **record["options"])
    opt = fmuon.presets.PRESETS[preset](record["lr"], labels=cases.is_matrix, **options)
    read = {"format": record["format"], "names": record["names"]}
    state, step = interop.read(saved, opt, half, **read, step=10)
    assert step == 10
    ours, after = run(opt, shapes, steps=SECOND, start=half, state=state)
    # dion's Polar Express amplifies; see cases.CONDITION.
    amplified = max(cases.CONDITION.values()) * 2**-24 if preset == "dion" else 0
    check(ours, whole, shapes, cases.FLOAT32 + amplified)
    # Back: what is written is what it had saved, up to the rounding of the sum's factor.
    again = interop.write(state, 10, saved, **read)
    for index, held in saved["state"].items():
        assert again["state"][index].keys() == held.keys()
        for key, value in held.items():
            torch.testing.assert_close(
                torch.as_tensor(again["state"][index][key]).double(),
                torch.as_tensor(value).double(), rtol=1e-6, atol=0,
            )  # fmt: skip
    assert after["missed"].keys() == state["missed"].keys()


def _unpacked(flat, shapes):
    return {k: torch.tensor(v, dtype=torch.float32).reshape(shapes[k]) for k, v in flat.items()}


def _value(stored):
    if isinstance(stored, dict):
        return torch.tensor(stored["values"], dtype=torch.float32).reshape(stored["shape"])
    return stored
