# SPDX-License-Identifier: Apache-2.0
"""bfloat16 and float16 weights that move as float32 ones do."""

import io
import math

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import refusal
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import fmuon
from fmuon.rounding import Stochastic, joined, leaf_key, noise, split

PRECISE = fmuon.NewtonSchulz(dtype="float32")
SIXTEEN = (torch.bfloat16, torch.float16)


def every_value(dtype):
    """All finite values of a dtype of 16 bits, as float32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).float()
    return values[values.isfinite()]


def bits_of(x, seed=0, path="w", count=1):
    shape = tuple(x.shape)
    block = [(0, side) for side in shape]
    return noise(leaf_key(seed, path), torch.tensor(count), shape, block)


# ---- stochastic rounding -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_what_the_format_holds_stays_and_the_rest_goes_to_a_neighbour(dtype):
    values = every_value(dtype)
    values = values[(values == 0) | (values.abs() > 2.0**-118)]
    for seed in range(3):
        assert torch.equal(Stochastic()(values, dtype, bits_of(values, seed)), values)
    ordered = values.unique()
    x = torch.empty(50_000).uniform_(-3, 3) * 2.0 ** torch.randint(-12, 12, (50_000,))
    rounded = Stochastic()(x, dtype, bits_of(x))
    above = torch.searchsorted(ordered, x).clamp(1, len(ordered) - 1)
    is_neighbour = (rounded == ordered[above]) | (rounded == ordered[above - 1])
    assert is_neighbour.all()
    assert torch.equal(rounded.to(dtype).float(), rounded)
    odd = torch.tensor([math.inf, -math.inf, math.nan])
    assert_close(Stochastic()(odd, dtype, bits_of(odd)), odd, equal_nan=True)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_the_mean_over_elements_and_updates_is_the_value(dtype):
    ulp = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    for fraction in (1 / 256, 0.25, 0.5, 0.9):
        for sign in (1, -1):
            x = torch.full((100, 300), sign * (1.5 + fraction * ulp))
            draws = [Stochastic()(x, dtype, bits_of(x, count=t)).double() for t in range(10)]
            mean = (torch.stack(draws).mean() - sign * 1.5) / (sign * ulp)
            # Four standard deviations of the mean of 300,000 draws.
            assert abs(mean - fraction) < 4 * math.sqrt(fraction * (1 - fraction) / 3e5)


def test_noise_is_noise():
    """Uniform in every bit, and without relation between elements, updates, leaves and seeds."""
    x = torch.empty(150, 200)
    first = bits_of(x)
    others = [bits_of(x, count=2), bits_of(x, path="v"), bits_of(x, seed=1), first.roll(1, 1)]
    others += [first.roll(1, 0), bits_of(x, count=3), bits_of(x, path="w.weight")]
    bound = 4.5 / math.sqrt(x.numel())
    for bit in range(32):
        own = 2.0 * ((first >> bit) & 1) - 1
        assert abs(own.mean()) < bound
        for other in others:
            for shift in (0, 1):
                related = 2.0 * ((other >> ((bit + shift) % 32)) & 1) - 1
                assert abs((own * related).mean()) < bound
    assert len(first.unique()) > 0.999 * x.numel()


def test_noise_of_a_part_is_the_part_of_the_noise():
    shape = (7, 5, 6)
    key, count = leaf_key(3, "w"), torch.tensor(9.0, dtype=torch.float64)
    whole = noise(key, count, shape, [(0, 7), (0, 5), (0, 6)])
    assert whole.shape == shape and whole.dtype == torch.int32
    part = noise(key, count, shape, [(2, 7), (0, 5), (1, 4)])
    assert torch.equal(part, whole[2:7, :, 1:4])
    assert noise(key, count, (), []).shape == ()
    assert torch.equal(noise(key, count, (4,), [(2, 2)]), torch.zeros(0, dtype=torch.int32))


# ---- mantissas -----------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_a_float32_is_its_nearest_bfloat16_and_a_mantissa(patterns):
    x = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    nearest, mantissa = split(x)
    weight = nearest.to(torch.bfloat16)
    assert mantissa.dtype == torch.uint8 and mantissa.shape == (len(patterns), 2)
    finite = x.isfinite() & weight.isfinite()
    again = joined(weight, mantissa)
    assert torch.equal(again[finite].view(torch.int32), x[finite].view(torch.int32))
    assert torch.equal(nearest[finite], weight[finite].float())
    away = (weight.double() - x.double()).abs()[finite]
    rounded = (x.to(torch.bfloat16).double() - x.double()).abs()[finite]
    assert torch.equal(away, rounded)
    assert_close(nearest[~x.isfinite()], x[~x.isfinite()], equal_nan=True)


@given(st.integers(-(2**15), 2**15 - 1), st.integers(0, 2**16 - 1))
@example(0, 0xFFFF)
@example(-(2**15), 0x8000)
def test_a_weight_that_was_changed_moves_half_a_unit_at_most(pattern, rest):
    weight = torch.tensor([pattern], dtype=torch.int16).view(torch.bfloat16)
    mantissa = torch.tensor([[rest & 255, rest >> 8]], dtype=torch.uint8)
    full = joined(weight, mantissa)
    if weight.isfinite():
        assert full.isfinite()
        nearest, same = split(full)
        assert nearest == weight.float() or not nearest.isfinite()
        assert nearest == 0 or not nearest.isfinite() or torch.equal(same, mantissa)
    else:
        assert torch.equal(full.isnan(), weight.isnan())


# ---- in updates ----------------------------------------------------------------------------------


def start(dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (24, 16), "v": (16, 24), "b": (24,), "embed": (30, 16)}
    # Of size 1: 1e-3 of an update is less than half a unit of their last place.
    drawn = {k: 1 + torch.rand(s, generator=generator) for k, s in shapes.items()}
    return {k: p.to(torch.bfloat16).to(dtype) for k, p in drawn.items()}


def gradients(params, steps):
    """Of the dtypes of the params, for every step; those of the float32 run are the same."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        yield {
            k: (torch.randn(p.shape, generator=generator) + 0.5).to(torch.bfloat16).to(p.dtype)
            for k, p in sorted(params.items())
        }


def run(opt, params, steps, update=None):
    state = opt.init(params)
    for step, grads in enumerate(gradients(params, steps)):
        updates, state = (update or opt.update)(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_hundred_steps_move_bfloat16_weights_as_they_move_float32_weights(decay):
    """[pitfall N10] Rounded to the nearest they don't move at all."""

    def after(dtype, **options):
        opt = fmuon.muon(1e-3, weight_decay=decay, orthogonalize=PRECISE, **options)
        return run(opt, start(dtype), 100)

    expected, _ = after(torch.float32)
    nearest, _ = after(torch.bfloat16)
    for k, p in start(torch.bfloat16).items():
        assert torch.equal(nearest[k], p)
    pair, state = after(torch.bfloat16, master="mantissa")
    for k, p in expected.items():
        assert pair[k].dtype == torch.bfloat16
        assert torch.equal(joined(pair[k], state["mantissa"][k]), p)
        assert torch.equal(pair[k], split(p)[0].to(torch.bfloat16))
    drawn, _ = after(torch.bfloat16, rounding="stochastic")
    for k, first in start(torch.float32).items():
        way = expected[k] - first
        assert way.square().mean().sqrt() > 5e-3
        # Entries stray by sqrt(100) / 2 units of 2^-7 at most, in directions of their own.
        along = ((drawn[k].float() - first) * way).sum() / way.norm()
        assert abs(along - way.norm()) < 4 * 5 * 2.0**-7
    again, _ = after(torch.bfloat16, rounding=fmuon.Stochastic(0))
    other, _ = after(torch.bfloat16, rounding=fmuon.Stochastic(1))
    assert_close(again, drawn, rtol=0, atol=0)
    assert not torch.equal(other["w"], drawn["w"])


@pytest.mark.parametrize(
    "options", [{"rounding": "stochastic"}, {"master": "mantissa"}, {"metrics": ("update_ratio",)}]
)
def test_compiles_where_params_are_needed_though_nothing_decays(options):
    opt = fmuon.muon(1e-2, orthogonalize=PRECISE, weight_decay=0, **options)
    params = {"w": torch.randn(4, 6, dtype=torch.bfloat16)}
    grads, state = {"w": torch.randn(4, 6)}, opt.init(params)
    compiled = fmuon.compile(opt.update, backend="eager")
    updates, _ = compiled(grads, state, 0, params)
    assert_close(updates, opt.update(grads, state, 0, params)[0])
    with pytest.raises(fmuon.ConfigurationError, match="needs the params"):
        compiled(grads, state, 0)


def test_float16_weights_are_rounded_at_random_too():
    params = {"w": torch.ones(16, 24, dtype=torch.float16)}
    opt = fmuon.muon(1e-4, orthogonalize=PRECISE, rounding="stochastic")
    after, state = run(opt, params, 50)
    expected, _ = run(opt, {"w": torch.ones(16, 24)}, 50)
    assert state["momentum"]["w"].dtype == torch.float32
    assert after["w"].dtype == torch.float16
    away = (after["w"].float() - expected["w"]).mean()
    assert abs(away) < 4 * math.sqrt(50) / 2 * 2.0**-10 / math.sqrt(16 * 24)
    nearest, _ = run(fmuon.muon(1e-4, orthogonalize=PRECISE), params, 50)
    assert torch.equal(nearest["w"], params["w"])


KINDS = {"stochastic": {"rounding": "stochastic"}, "mantissa": {"master": "mantissa"}}


def as_module(params):
    module = nn.Module()
    for name, p in params.items():
        module.register_parameter(name, nn.Parameter(p.clone()))
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_pure_in_place_compiled_and_FMuon_do_the_same(kind):
    options = {"lr": 1e-3, "weight_decay": 0.1, "orthogonalize": PRECISE, **KINDS[kind]}
    labels = {"embed": "auxiliary"}
    opt = fmuon.muon(**options, labels=labels)
    params = start(torch.bfloat16) | {"full": torch.randn(6, 8)}
    expected, state = run(opt, params, 4)
    assert set(state.get("mantissa", ())) == (
        set() if kind == "stochastic" else {*params} - {"full"}
    )
    own, own_state = {k: p.clone() for k, p in params.items()}, opt.init(params)
    module = as_module(params)
    shim = fmuon.FMuon(module, **options, labels=labels, compile=False)
    for step, grads in enumerate(gradients(params, 4)):
        fmuon.update_(opt, own, grads, own_state, step)
        for k, p in module.named_parameters():
            p.grad = grads[k]
        shim.step()
    assert_close(own, expected, rtol=0, atol=0)
    assert_close(own_state, state, rtol=0, atol=0)
    for k, p in module.named_parameters():
        assert torch.equal(p, expected[k]), k
    counter = CompileCounterWithBackend("inductor")
    compiled, compiled_state = run(opt, params, 4, fmuon.compile(opt.update, backend=counter))
    assert counter.frame_count == 1
    assert_close(compiled_state["momentum"], state["momentum"], rtol=1e-6, atol=1e-7)
    for k, p in compiled.items():
        if k in state.get("mantissa", ()):
            full = joined(p, compiled_state["mantissa"][k])
            there = joined(expected[k], state["mantissa"][k])
            assert (full - there).norm() <= 1e-4 * (there - params[k].float()).norm(), k
        # Sums in another order may put a value on the other side of a boundary.
        assert p.dtype == torch.float32 or (p != expected[k]).float().mean() <= 0.01, k


@pytest.mark.parametrize("kind", KINDS)
def test_a_leaf_that_sits_out_keeps_its_bits_and_its_draws(kind):
    opt = fmuon.muon(0.01, weight_decay=0.1, orthogonalize=PRECISE, **KINDS[kind])
    params = {
        "w": torch.randn(6, 8, dtype=torch.bfloat16),
        "b": -torch.zeros(5, dtype=torch.bfloat16),
    }
    grads = {k: torch.randn(p.shape) for k, p in params.items()}
    _, state = opt.update(grads, opt.init(params), 0, params)
    flags = dict.fromkeys(params, torch.tensor(False))
    updates, after = opt.update(grads, state, 1, params, present=flags)
    new = fmuon.apply_updates(params, updates)
    for k, p in params.items():
        assert torch.equal(new[k].view(torch.int16), p.view(torch.int16))
    assert_close(after.get("mantissa"), state.get("mantissa"), rtol=0, atol=0)
    # The next update is the one that was left out.
    expected, _ = opt.update(grads, state, 1, params)
    late, _ = opt.update(grads, after, 2, params)
    assert_close(late, expected, rtol=0, atol=0)


def test_an_outside_change_of_the_weights_is_not_undone():
    opt = fmuon.muon(1e-3, orthogonalize=PRECISE, master="mantissa")
    params, state = run(opt, start(torch.bfloat16), 5)
    changed = {**params, "w": params["w"] * 2, "v": torch.zeros_like(params["v"])}
    zeros = {k: torch.zeros(p.shape) for k, p in params.items()}
    updates, _ = opt.update(zeros, state, 5, changed, lr=0.0)
    after = fmuon.apply_updates(changed, updates)
    assert_close(after, changed, rtol=0, atol=0)


def test_state_and_checkpoints_of_FMuon():
    module = as_module(start(torch.bfloat16))

    def make():
        return fmuon.FMuon(module, lr=1e-3, master="mantissa", compile=False)

    def step(optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()

    optimizer = make()
    step(optimizer, 0)
    file = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), file)
    step(optimizer, 1)
    expected = {k: p.clone() for k, p in module.state_dict().items()}
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    entry = saved["state"][0]
    assert (
        entry["mantissa"].dtype == torch.uint8 and entry["momentum_buffer"].dtype == torch.float32
    )
    module.load_state_dict(weights)
    resumed = make()
    resumed.load_state_dict(saved)
    step(resumed, 1)
    assert_close(module.state_dict(), expected, rtol=0, atol=0)
    assert_close(resumed.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


def test_a_leaf_of_a_rule_without_moments_keeps_its_shape_in_a_checkpoint():
    module = as_module(start(torch.bfloat16))
    options = {"auxiliary": fmuon.sgd(), "master": "mantissa", "compile": False}
    optimizer = fmuon.FMuon(module, **options)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert set(optimizer.state[module.b]) == {"mantissa", "step"}
    again = fmuon.FMuon(module, **options)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[module.b]["mantissa"], optimizer.state[module.b]["mantissa"])


def test_errors():
    half = {"w": torch.ones(4, 6, dtype=torch.float16)}
    brain = {"w": torch.ones(4, 6, dtype=torch.bfloat16)}
    mantissa, plain = fmuon.muon(master="mantissa"), fmuon.muon()
    state = mantissa.init(brain)
    short = {**state, "mantissa": {"w": torch.zeros(4, 6, dtype=torch.int16)}}
    assert_expected_inline(
        "\n".join(
            refusal(fmuon.FMuonError, function)
            for function in (
                lambda: fmuon.muon(rounding="up"),
                lambda: fmuon.muon(rounding=1),
                lambda: fmuon.Stochastic(seed=0.5),
                lambda: fmuon.muon(master="float32"),
                lambda: fmuon.muon(master="mantissa", rounding="stochastic"),
                lambda: fmuon.muon(rounding="stochastic", differentiable=True),
                lambda: mantissa.init(half),
                lambda: mantissa.update(brain, state, 0),
                lambda: fmuon.muon(rounding="stochastic").update(brain, plain.init(brain), 0),
                lambda: mantissa.update(brain, plain.init(brain), 0, brain),
                lambda: mantissa.update(brain, state, 0, {"w": torch.ones(4, 6)}),
                lambda: mantissa.update(brain, {**state, "mantissa": {}}, 0, brain),
                lambda: plain.update(brain, state, 0, brain),
                lambda: mantissa.update(brain, short, 0, brain),
            )
        ),
        """\
unknown rounding 'up'; known: 'nearest', 'stochastic'
rounding=1; known: 'nearest', 'stochastic', a fmuon.Stochastic
Stochastic: seed=0.5; give an int
master='float32'; known: None, 'mantissa'
rounding=Stochastic(seed=0) beside master='mantissa', which keeps what rounding
drops; give one of the two
differentiable=True beside rounding=Stochastic(seed=0), which has no derivative;
leave out one
'w': master='mantissa' splits a float32 into bfloat16 and its other 16 bits, and
this leaf is float16; make it bfloat16, or give rounding='stochastic' instead
master='mantissa' needs the params: call update(grads, state, step, params), or
set master=None
rounding=Stochastic(seed=0) needs the params: call update(grads, state, step,
params), or set rounding='nearest'
no state of fmuon for this opt: it has the keys ['auxiliary', 'missed',
'momentum'] and lacks ['mantissa']; make it with init
'w': the state holds a mantissa for it, which does not go with master='mantissa'
and params of torch.float32; make the state with the opt, and of the params,
that are used
'w': the state holds no mantissa for it, which does not go with
master='mantissa' and params of torch.bfloat16; make the state with the opt, and
of the params, that are used
'w': the state holds a mantissa for it, which does not go with master=None and
params of torch.bfloat16; make the state with the opt, and of the params, that
are used
'w': its mantissa has torch.int16 and shape (4, 6), and needs torch.uint8 and
(4, 6, 2); use the state that this opt made""",
    )
