# SPDX-License-Identifier: Apache-2.0
"""Momentum in 8 bits."""

import io
from math import ceil, prod

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from strategies import refusal
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import fmuon
from fmuon.lowbit import BLOCK, FORMATS, decode, encode, fits, own_scale_shape, scale_shape

pytest.importorskip("torchao", reason="int8 needs torchao: the extra `lowbit`")

PRECISE = fmuon.NewtonSchulz(dtype="float32")
NAMES = tuple(FORMATS)
# One write of a normal number: half a step of 127 in the power 0.6 at the largest; 3 bits of e4m3.
STEP = {"int8": (0.5 / 127) / 0.6 + 1e-3, "fp8": 2.0**-4 + 1e-3}


def written(name, x):
    scales = scale_shape("w", tuple(x.shape), {})
    return decode(name, *encode(name, x, scales))


def drawn(law, shape):
    if law == "gauss":
        return torch.randn(shape)
    if law == "laplace":
        return torch.distributions.Laplace(0.0, 1.0).sample(shape)
    return torch.distributions.StudentT(3.0).sample(shape)


# ---- one write -----------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["gauss", "laplace", "student"])
@pytest.mark.parametrize("side", [256, 272, 400, 768, 1024])
def test_one_write_of_int8_is_off_by_one_percent_at_most(law, side):
    x = drawn(law, (1000, side))
    assert (written("int8", x) - x).norm() <= 0.01 * x.norm()


def test_one_write_of_fp8_is_off_by_what_three_bits_are():
    x = torch.randn(500, 512)
    assert 0.01 * x.norm() < (written("fp8", x) - x).norm() <= 0.03 * x.norm()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_sizes(name):
    x = torch.randn(4, 300)
    x[1] = 0
    x[2, 20:] = 0
    once = written(name, x)
    assert not once[1].any() and not once[2, 20:].any()
    for power in (-60, -20, 20, 60):
        assert_close(written(name, x * 2.0**power), once * 2.0**power, rtol=1e-5, atol=0)
    assert_close(written(name, once), once, rtol=1e-5, atol=0)
    assert not torch.isnan(written(name, torch.zeros(3, 5))).any()


def reference(x, scales):
    """The int8 of one leaf, block by block."""
    start, stop = next(
        ((a, b) for a in range(x.ndim) for b in range(x.ndim, a, -1)
         if scales[:a] == x.shape[:a] and scales[b:] == x.shape[b:]
         and all(s == 1 for s in scales[a + 1:b])),
    )  # fmt: skip
    rows = x.double().reshape(prod(x.shape[:start]), -1, prod(x.shape[stop:])).clone()
    size = ceil(rows.shape[1] / max(1, scales[start]))
    for lead in range(rows.shape[0]):
        for rest in range(rows.shape[2]):
            for first in range(0, rows.shape[1], max(1, size)):
                block = rows[lead, first : first + size, rest]
                power = block.sign() * block.abs() ** 0.6
                step = power.abs().max() / 127
                codes = (power / step).round() if step else power
                rows[lead, first : first + size, rest] = codes.sign() * (codes.abs() * step) ** (
                    1 / 0.6
                )
    return rows.reshape(x.shape)


SHAPES = st.lists(st.integers(1, 40), min_size=2, max_size=4)


@given(SHAPES, st.sets(st.integers(0, 3), max_size=2), st.sampled_from(NAMES))
def test_every_shape_and_every_cut(shape, sharded, name):
    shape, sharded = tuple(shape), {axis for axis in sharded if axis < len(shape)}
    if len(sharded) == len(shape):
        sharded = {0}
    parts = dict.fromkeys(sharded, 2)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(prod(shape)))
    scales = scale_shape("w", shape, parts)
    assert fits(shape, scales)
    codes, scale = encode(name, x, scales)
    assert codes.shape == shape and codes.dtype == FORMATS[name].codes
    assert scale.shape == scales and scale.dtype == torch.float32
    values = decode(name, codes, scale)
    bound = STEP[name] * x.abs().max()
    assert ((values - x).abs() <= bound).all()
    if name == "int8":
        # One step off where a double rounds otherwise.
        off = (values - reference(x, scales)).abs() > 1e-5 * x.abs().max()
        assert off.float().mean() <= 0.01
    for axis in sharded:
        half = shape[axis] // 2
        cut = [t.narrow(axis, half, shape[axis] - half) for t in (x, codes, scale)]
        own = tuple(cut[2].shape)
        assert own == own_scale_shape(scales, shape, tuple(cut[0].shape), parts)
        # A root in a vector register may end otherwise than one alone.
        codes_of_part, scale_of_part = encode(name, cut[0].contiguous(), own)
        assert_close(scale_of_part, cut[2], rtol=1e-6, atol=0)
        assert (codes_of_part != cut[1]).float().mean() <= 0.001


@pytest.mark.parametrize(
    ("shape", "parts", "scales"),
    [
        ((512, 768), {}, (512, 3)),
        ((512, 272), {0: 2}, (512, 1)),
        ((512, 273), {0: 2}, (512, 2)),
        ((512, 768), {1: 2}, (2, 768)),
        ((512, 768), {0: 2, 1: 2}, (512, 4)),
        ((512, 768), {0: 2, 1: 4}, (512, 4)),
        ((512, 768), {0: 2, 1: 3}, (512, 3)),
        ((64, 32, 3, 3), {}, (64, 2, 1, 1)),
        ((64, 32, 3, 3), {1: 2}, (64, 32, 1, 1)),
        ((8, 600, 300), {0: 2, 1: 2}, (8, 600, 2)),
        ((8, 600, 300), {0: 2, 2: 2}, (8, 3, 300)),
        ((4, 6, 8), {}, (4, 1, 1)),
        ((4, 6, 8), {0: 3}, (4, 1, 1)),
        ((6, 4), {}, (6, 1)),
        ((6, 0), {}, (6, 0)),
        ((0, 6), {}, (0, 1)),
    ],
)
def test_where_the_blocks_are(shape, parts, scales):
    assert scale_shape("w", shape, parts) == scales
    codes, scale = encode("int8", torch.randn(shape), scales)
    assert decode("int8", codes, scale).shape == shape
    assert not fits((*shape, 1), scales)


def test_bytes_per_parameter_of_every_length_from_256_on():
    for side in range(256, 5000):
        (blocks,) = scale_shape("w", (1, side), {})[1:]
        assert side + 4 * blocks <= 1.03 * side
        assert ceil(side / blocks) <= BLOCK


# ---- in updates ----------------------------------------------------------------------------------


def tree():
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (24, 300), "v": (300, 24), "s": (4, 16, 20), "c": (8, 4, 3, 3), "b": (24,)}
    return {k: torch.randn(s, generator=generator) for k, s in shapes.items()}


LABELS = {"s": fmuon.Matrix(1, 2), "c": fmuon.Matrix(0, (1, 2, 3))}


def gradients(params, step):
    generator = torch.Generator().manual_seed(10 + step)
    return {k: torch.randn(p.shape, generator=generator) for k, p in sorted(params.items())}


def configured(**options):
    return fmuon.muon(0.01, weight_decay=0.1, orthogonalize=PRECISE, labels=LABELS, **options)


def run(opt, steps=4, update=None):
    params = tree()
    state = opt.init(params)
    for step in range(steps):
        updates, state = (update or opt.update)(gradients(params, step), state, step, params)
        params = fmuon.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", NAMES)
def test_every_update_is_that_of_the_momentum_that_was_read_back(name):
    """Beside a float32 momentum that is written and read by hand after every step."""
    opt, plain = configured(momentum_dtype=name), configured()
    params, state = tree(), opt.init(tree())
    own, own_state = tree(), plain.init(tree())
    for step in range(20):
        updates, state = opt.update(gradients(params, step), state, step, params)
        params = fmuon.apply_updates(params, updates)
        updates, own_state = plain.update(gradients(own, step), own_state, step, own)
        own = fmuon.apply_updates(own, updates)
        for path, momentum in own_state["momentum"].items():
            own_state["momentum"][path] = written(name, momentum)
    assert_close(params, own, rtol=1e-5, atol=1e-6)
    far, _ = run(plain, 20)
    for path in LABELS:
        moved = (far[path] - tree()[path]).norm()
        assert 0 < (params[path] - far[path]).norm() < 0.1 * moved


@pytest.mark.parametrize("name", NAMES)
def test_pure_in_place_compiled_and_FMuon_do_the_same(name):
    opt = configured(momentum_dtype=name)
    expected, state = run(opt)
    for path, codes in state["momentum"].items():
        assert codes.shape == tree()[path].shape and codes.dtype == FORMATS[name].codes
    counter = CompileCounterWithBackend("inductor")
    compiled, _ = run(opt, update=fmuon.compile(opt.update, backend=counter))
    assert counter.frame_count == 1
    for path, p in compiled.items():
        moved = (expected[path] - tree()[path]).norm()
        assert (p - expected[path]).norm() <= 1e-4 * moved, path
    params, own_state = tree(), opt.init(tree())
    module = nn.Module()
    for path, p in params.items():
        module.register_parameter(path, nn.Parameter(p.clone()))
    shim = fmuon.FMuon(
        module, lr=0.01, weight_decay=0.1, orthogonalize=PRECISE, labels=LABELS,
        momentum_dtype=name, compile=False,
    )  # fmt: skip
    for step in range(4):
        grads = gradients(params, step)
        fmuon.update_(opt, params, grads, own_state, step)
        for path, p in module.named_parameters():
            p.grad = grads[path]
        shim.step()
    assert_close(params, expected, rtol=0, atol=0)
    assert_close(own_state, state, rtol=0, atol=0)
    assert_close(dict(module.named_parameters()), expected, rtol=1e-7, atol=0)
    assert shim.state[module.w]["momentum_buffer"].dtype == FORMATS[name].codes
    assert torch.equal(shim.state[module.w]["momentum_buffer"], state["momentum"]["w"])
    assert torch.equal(shim.state[module.w]["momentum_buffer_scale"], state["momentum_scale"]["w"])


@pytest.mark.parametrize("name", NAMES)
def test_a_leaf_that_sits_out_keeps_its_bits(name):
    opt = configured(momentum_dtype=name)
    params, state = run(opt, 2)
    flags = dict.fromkeys(params, torch.tensor(False))
    _, after = opt.update(gradients(params, 2), state, 2, params, present=flags)
    for slot in ("momentum", "momentum_scale"):
        assert_close(after[slot], state[slot], rtol=0, atol=0)
        for path, tensor in after[slot].items():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, path


def test_every_float64_leaf_and_every_empty_one():
    params = {"w": torch.randn(4, 6, dtype=torch.float64), "none": torch.zeros(0, 6)}
    opt = fmuon.muon(momentum_dtype="int8", labels={"re:.*": "muon"})
    updates, state = opt.update(params, opt.init(params), 0, params)
    assert updates["w"].dtype == torch.float64 and updates["none"].dtype == torch.float32
    assert state["momentum"]["none"].shape == (0, 6)


def test_vmap_over_members():
    opt = fmuon.muon(0.01, orthogonalize=PRECISE, momentum_dtype="int8")
    params = {"w": torch.randn(3, 8, 20)}
    grads = {"w": torch.randn(3, 8, 20)}

    def step(params, grads):
        updates, state = opt.update(grads, opt.init(params), 0, params)
        return opt.update(grads, state, 1, params)[0], updates

    together = torch.func.vmap(step)(params, grads)
    for i in range(3):
        alone = step({"w": params["w"][i]}, {"w": grads["w"][i]})
        assert_close([t["w"][i] for t in together], [t["w"] for t in alone], rtol=1e-4, atol=1e-6)


BYTES = {None: 4.0, torch.bfloat16: 2.0, "int8": 1.03, "fp8": 1.03}


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_bytes_of_the_state_and_of_its_file(dtype):
    params = {f"w{i}": torch.randn(1000, side) for i, side in enumerate((256, 600, 1000, 273))}
    opt = fmuon.muon(momentum_dtype=dtype)
    _, state = opt.update(params, opt.init(params), 0)
    count = sum(p.numel() for p in params.values())
    slots = [state["momentum"], state.get("momentum_scale", {})]
    held = sum(t.numel() * t.itemsize for slot in slots for t in slot.values())
    assert held <= BYTES[dtype] * count
    assert BYTES[dtype] == 1.03 or held == BYTES[dtype] * count
    file = io.BytesIO()
    torch.save(state, file)
    # Names, shapes and the padding of a few tensors.
    assert len(file.getvalue()) <= BYTES[dtype] * count + 10_000
    file.seek(0)
    assert_close(torch.load(file, weights_only=True), state, rtol=0, atol=0)


def test_checkpoints_of_FMuon():
    model = nn.Sequential(nn.Linear(300, 24), nn.Linear(24, 300))

    def make(dtype="int8"):
        return fmuon.FMuon(model, lr=0.01, momentum_dtype=dtype, compile=False)

    def step(optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    optimizer = make()
    step(optimizer, 0)
    weights, saved = model.state_dict(), optimizer.state_dict()
    file = io.BytesIO()
    torch.save((weights, saved), file)
    step(optimizer, 1)
    expected = {k: p.clone() for k, p in model.state_dict().items()}
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    model.load_state_dict(weights)
    resumed = make()
    resumed.load_state_dict(saved)
    step(resumed, 1)
    assert_close(model.state_dict(), expected, rtol=0, atol=0)
    with pytest.raises(
        fmuon.StateError, match=r"momentum_buffer_scale.*needs \['momentum_buffer',"
    ):
        make(None).load_state_dict(saved)


def test_errors():
    params = {"w": torch.randn(4, 6)}
    plain, int8, fp8 = (fmuon.muon(momentum_dtype=name) for name in (None, "int8", "fp8"))
    state = int8.init(params)
    wide = {**state, "momentum_scale": {"w": torch.zeros(6)}}
    assert_expected_inline(
        "\n".join(
            refusal(fmuon.FMuonError, function)
            for function in (
                lambda: fmuon.muon(momentum_dtype="int4"),
                lambda: fmuon.muon(momentum_dtype=torch.int8),
                lambda: fmuon.muon(momentum_dtype="int8", differentiable=True),
                lambda: scale_shape("w", (4, 6), {0: 2, 1: 4}),
                lambda: int8.update(params, plain.init(params), 0),
                lambda: plain.update(params, state, 0),
                lambda: fp8.update(params, state, 0),
                lambda: int8.update(params, wide, 0),
            )
        ),
        """\
unknown momentum_dtype 'int4'; known: 'int8', 'fp8'; did you mean 'int8'?
momentum_dtype=torch.int8: give a floating point torch.dtype, None, or one of
'int8', 'fp8'
differentiable=True beside momentum_dtype='int8', which has no derivative; leave
out one
'w': every axis of its shape (4, 6) is sharded, the last into 4 parts of unequal
length, and a momentum of 8 bits needs one that is whole or evenly cut; shard it
otherwise, or set momentum_dtype=None
no state of fmuon for this opt: it has the keys ['auxiliary', 'missed',
'momentum'] and lacks ['momentum_scale']; make it with init
'w': state 'momentum' of dtype torch.int8; floating point needed
'w': the state holds a momentum of torch.int8 and shape (4, 6) with scales of
shape (4, 1), which is none of momentum_dtype='fp8'; use the opt that made this
state
'w': the state holds a momentum of torch.int8 and shape (4, 6) with scales of
shape (6,), which is none of momentum_dtype='int8'; use the opt that made this
state""",
    )
