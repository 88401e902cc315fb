# SPDX-License-Identifier: Apache-2.0
"""The methods by name, and what `Auto` chooses where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import polar
from torch.testing import assert_close

import fmuon
from fmuon import Auto, GramNewtonSchulz, NewtonSchulz, PolarSVD, Zolotarev
from fmuon.methods import MARGIN, METHODS, QUALITIES, cost

CPU, GPU = torch.device("cpu"), torch.device("cuda")
STACKS = st.integers(1, 200)
SIDES = st.integers(1, 4096)


@pytest.mark.parametrize("name", METHODS)
def test_every_name_is_a_method_that_can_be_a_key(name):
    x = torch.randn(3, 5, 7)
    method = METHODS[name]()
    assert method == METHODS[name]() and hash(method) == hash(METHODS[name]())
    assert_close(fmuon.muon(orthogonalize=name).update.__self__.orthogonalize(x), method(x))


@pytest.mark.parametrize(
    ("stack", "short", "long", "expected"),
    [
        # Small sides are for polynomials, of the Gram matrix where the other side is long enough.
        (1, 64, 64, NewtonSchulz(dtype="float32")),
        (64, 32, 32, NewtonSchulz(dtype="float32")),
        (16, 64, 576, GramNewtonSchulz(dtype="float32")),
        (1, 128, 512, GramNewtonSchulz(dtype="float32")),
        (2, 128, 128, NewtonSchulz(dtype="float32")),
        (24, 128, 128, Zolotarev()),
        (1, 256, 256, Zolotarev()),
        (2, 768, 3072, Zolotarev()),
    ],
)
def test_what_is_chosen_where(stack, short, long, expected):
    assert Auto().choose(stack, short, long, torch.float32, CPU) == expected


@given(STACKS, SIDES, SIDES, st.sampled_from(["ns5", "high"]))
def test_the_choice_is_never_dearer_than_the_standard_form(stack, one, other, quality):
    short, long = sorted((one, other))
    method = Auto(quality).choose(stack, short, long, torch.float32, CPU)
    standard, *others = QUALITIES[quality]()["float32"]
    costs = [cost(m, stack, short, long) for m in (standard, *others)]
    assert cost(method, stack, short, long) <= min(costs) * MARGIN
    assert cost(method, stack, short, long) <= costs[0]


@given(STACKS, SIDES, SIDES, st.sampled_from(["ns5", "high"]))
def test_on_other_devices_nothing_is_factorised(stack, one, other, quality):
    short, long = sorted((one, other))
    method = Auto(quality).choose(stack, short, long, torch.float32, GPU)
    assert isinstance(method, NewtonSchulz) and method.dtype == "auto"


@pytest.mark.parametrize("shape", [(3, 20, 30), (2, 256, 300)])
def test_float64_is_computed_in_float64(shape):
    x = torch.randn(shape, dtype=torch.float64)
    result = Auto()(x)
    method = Auto().choose(*shape, torch.float64, CPU)
    assert result.dtype == torch.float64
    # As exactly as the method itself, in which no step is rounded to float32.
    assert_close(result, method(x))
    assert (Auto("exact")(x) - polar(x)).abs().max() < 1e-12


def test_the_exact_quality_is_the_decomposition():
    assert Auto("exact").choose(4, 8, 8, torch.float32, CPU) == PolarSVD()


def test_an_unknown_quality_is_refused():
    with pytest.raises(fmuon.ConfigurationError, match=r"quality.*'best'.*ns5"):
        Auto("best")


# ---- in an update --------------------------------------------------------------------------------


def tree(count, *shape):
    return {f"w{i:02}": torch.randn(shape) for i in range(count)}


@pytest.mark.parametrize("bytes", [None, 1])
def test_the_choice_does_not_depend_on_how_the_work_is_cut(bytes):
    # Alone one of them would not be factorised.
    params = tree(24, 128, 128)
    assert Auto().choose(1, 128, 128, torch.float32, CPU) != Zolotarev()
    opts = [
        fmuon.muon(orthogonalize=method, max_stack_bytes=bytes) for method in ("auto", Zolotarev())
    ]
    results = [opt.update(params, opt.init(params), 0)[0] for opt in opts]
    for path in params:
        assert torch.equal(results[0][path], results[1][path])


def test_explain_shows_the_choice():
    params = tree(24, 128, 128) | {"small": torch.randn(16, 16)}
    text = str(fmuon.explain(params, fmuon.muon(orthogonalize="auto")))
    assert "1 of 16 x 16 by newton_schulz(jordan, 5 steps, float32)" in text
    assert "24 of 128 x 128 by zolotarev(2 poles, lower 0.001)" in text
    assert text.endswith("by auto(ns5)")


def test_a_compiled_update_with_every_method_in_it_is_one_graph():
    params = tree(24, 128, 128) | {"small": torch.randn(16, 16), "long": torch.randn(64, 576)}
    opt = fmuon.muon(orthogonalize="auto")
    update = fmuon.compile(opt.update, backend="aot_eager")
    state = opt.init(params)
    expected, _ = opt.update(params, state, 0)
    updates, state = update(params, state, 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        update(params, state, 1)
    for path in params:
        assert_close(updates[path], expected[path], rtol=1e-3, atol=1e-6)
