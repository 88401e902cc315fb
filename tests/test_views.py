# SPDX-License-Identifier: Apache-2.0
"""Every kind of weight through the whole stack, beside its matrices one by one in float64."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import matrix_views
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import fmuon
from fmuon import Matrix

STEPS, LR, MOMENTUM, DECAY = 3, 0.05, 0.9, 0.1
DOUBLE = {"rtol": 1e-9, "atol": 1e-11}


class Kind(NamedTuple):
    """A weight: its view, its shape, and how its matrices are cut out of it by hand.

    `cut` returns views (rows = fan_out), into which the reference writes. `made` gives a tensor of
    that shape other strides.
    """

    view: Matrix
    shape: tuple[int, ...]
    cut: Callable[[torch.Tensor], list[torch.Tensor]]
    made: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous


def alone(w):
    return [w]


def rows(*sizes):
    return lambda w: list(w.split(sizes))


def columns(*sizes):
    return lambda w: list(w.split(sizes, 1))


def each(cut=alone):
    return lambda w: [matrix for member in w for matrix in cut(member)]


def filters(w):
    """[out, in, *kernel] -> out x (in * kernel)"""
    return [_Flat(w, lambda t: t.reshape(len(t), -1))]


def transposed_filters(w):
    """[in, out, *kernel] -> out x (in * kernel)"""
    return [_Flat(w, lambda t: t.transpose(0, 1).reshape(t.shape[1], -1))]


class _Flat:
    """A matrix that is no view of its leaf: read by a function, written through its inverse."""

    def __init__(self, leaf, function):
        self.leaf, self.function = leaf, function
        self.index = function(torch.arange(leaf.numel()).reshape(leaf.shape))

    def read(self):
        return self.function(self.leaf)

    def copy_(self, matrix):
        flat = self.leaf.flatten()
        flat[self.index.flatten()] = matrix.flatten()
        self.leaf.copy_(flat.reshape(self.leaf.shape))


def read(matrix):
    return matrix.read() if isinstance(matrix, _Flat) else matrix


def in_columns(w):
    return w.T.contiguous().T


def channels_last(w):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return w.to(memory_format=formats[w.ndim])


KINDS = {
    # Fused projections: queries, keys, values; with a gate; grouped; head by head.
    "qkv": Kind(Matrix(blocks=(8, 8, 8)), (24, 8), rows(8, 8, 8)),
    "grouped_qkv": Kind(Matrix(blocks=(8, 4, 4)), (16, 8), rows(8, 4, 4)),
    "gated_qkv": Kind(Matrix(blocks=(8, 8, 4, 4)), (24, 8), rows(8, 8, 4, 4)),
    "gate_up": Kind(Matrix(blocks=(12, 12)), (24, 8), rows(12, 12)),
    "heads": Kind(Matrix(blocks=(3,) * 8), (24, 8), rows(*[3] * 8)),
    "head_outputs": Kind(Matrix(blocks_in=(3,) * 4), (8, 12), columns(*[3] * 4)),
    "grid": Kind(
        Matrix(blocks=(4, 5), blocks_in=(2, 6)),
        (9, 8),
        lambda w: [part for row in w.split((4, 5)) for part in row.split((2, 6), 1)],
    ),
    "in_out_qkv": Kind(
        Matrix(1, 0, blocks=(8, 4, 4)), (8, 16), lambda w: list(w.T.split((8, 4, 4)))
    ),
    "head_axis": Kind(Matrix((0, 1), 2), (4, 3, 8), lambda w: [w.view(12, 8)]),
    "head_stack": Kind(Matrix(1, 2), (4, 3, 8), each()),
    # Stacks of experts.
    "experts": Kind(Matrix(1, 2), (3, 6, 5), each()),
    "in_out_experts": Kind(Matrix(2, 1), (3, 5, 6), each(lambda w: [w.T])),
    "last_axis_experts": Kind(
        Matrix(0, 1), (6, 5, 3), lambda w: [w[..., i] for i in range(w.shape[-1])]
    ),
    "gate_up_experts": Kind(Matrix(1, 2, blocks=(6, 6)), (3, 12, 5), each(rows(6, 6))),
    "layers_of_experts": Kind(Matrix(2, 3), (2, 3, 6, 5), each(each())),
    # Convolutions.
    "conv1d": Kind(Matrix(0, (1, 2)), (8, 3, 5), filters),
    "conv2d": Kind(Matrix(0, (1, 2, 3)), (8, 3, 3, 2), filters),
    "conv3d": Kind(Matrix(0, (1, 2, 3, 4)), (6, 2, 3, 2, 2), filters),
    "conv2d_channels_last": Kind(Matrix(0, (1, 2, 3)), (8, 3, 3, 2), filters, channels_last),
    "conv3d_channels_last": Kind(Matrix(0, (1, 2, 3, 4)), (6, 2, 3, 2, 2), filters, channels_last),
    "grouped_conv": Kind(
        Matrix(0, (1, 2), blocks=(4, 4)),
        (8, 3, 5),
        lambda w: [m for part in w.split(4) for m in filters(part)],
    ),
    "transposed_conv": Kind(Matrix(1, (0, 2, 3)), (3, 8, 3, 2), transposed_filters),
    "depthwise": Kind(Matrix(0, (1, 2)), (8, 1, 3), filters),
    # Other layouts in memory.
    "in_out": Kind(Matrix(1, 0), (5, 8), lambda w: [w.T]),
    "strided": Kind(Matrix(), (9, 4), alone, in_columns),
    "strided_experts": Kind(Matrix(1, 2), (3, 6, 5), each(), lambda w: w.mT.contiguous().mT),
    # Adapters, rank x in and out x rank.
    "lora_a": Kind(Matrix(), (2, 60), alone),
    "lora_b": Kind(Matrix(), (60, 2), alone),
}
LABELS = {path: kind.view for path, kind in KINDS.items()}


def tree(dtype, names=KINDS):
    return {path: KINDS[path].made(torch.randn(KINDS[path].shape, dtype=dtype)) for path in names}


def configured(scale="original", **options):
    """A scale that tells fan_out from fan_in."""
    options = {"weight_decay": DECAY, "labels": LABELS, **options}
    return fmuon.muon(LR, momentum=MOMENTUM, scale=scale, **options)


def of(*paths):
    return {"labels": {path: LABELS[path] for path in paths}}


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_a_weight_moves_as_its_matrices_do_one_by_one(path, scale):
    kind = KINDS[path]
    params = tree(torch.float64, [path])
    opt = configured(scale, orthogonalize=fmuon.NewtonSchulz(eps=0.0), **of(path))
    state = opt.init(params)
    weight, moment = params[path].clone(), torch.zeros_like(params[path])
    for step in range(STEPS):
        grads = tree(torch.float64, [path])
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        own = [kind.cut(tensor) for tensor in (weight, grads[path], moment)]
        for w, g, m in zip(*own, strict=True):
            new_w, new_m = references.muon_step(
                read(w), read(g), read(m), step + 1, lr=LR, b=MOMENTUM, nesterov=True,
                bias_correction=True, weight_decay=DECAY, scale=scale,
            )  # fmt: skip
            w.copy_(new_w)
            m.copy_(new_m)
    assert_close(params[path], weight, **DOUBLE)
    assert_close(state["momentum"][path], moment, **DOUBLE)
    for tensor in (updates[path], params[path], state["momentum"][path]):
        assert tensor.shape == kind.shape and tensor.stride() == weight.stride()


@given(matrix_views(), st.randoms(use_true_random=False), st.integers(0, 2**31))
def test_any_view_of_any_strides_moves_as_its_matrices_do(case, random, seed):
    view, shape = case
    generator = torch.Generator().manual_seed(seed)
    order = random.sample(range(len(shape)), len(shape))
    inverse = [order.index(axis) for axis in range(len(shape))]
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    leaf = {"w": grad.permute(order).contiguous().permute(inverse)}
    opt = fmuon.muon(
        1.0, scale="spectral", labels={"w": view}, orthogonalize=fmuon.NewtonSchulz(eps=0.0)
    )
    updates, _ = opt.update(leaf, opt.init(leaf), 0)
    axes = [(v,) if isinstance(v, int) else v for v in (view.fan_out, view.fan_in)]
    named = [axis % len(shape) for axis in (*axes[0], *axes[1])]
    first = [axis for axis in range(len(shape)) if axis not in named]

    def matrices(tensor):
        fan_out = math.prod(tensor.shape[axis] for axis in axes[0])
        moved = tensor.permute(*first, *named)
        for member in moved.reshape(-1, fan_out, moved[(0,) * len(first)].numel() // fan_out):
            for part in member.split(view.blocks or (member.shape[0],)):
                yield from part.split(view.blocks_in or (member.shape[1],), 1)

    for own, matrix in zip(matrices(updates["w"]), matrices(grad), strict=True):
        factor = references.newton_schulz(matrix) * references.SCALES["spectral"](*matrix.shape)
        assert_close(own, -factor, **DOUBLE)
    assert updates["w"].stride() == leaf["w"].stride()


def test_the_matrices_of_a_weight_cover_it_once():
    for kind in KINDS.values():
        marks = torch.zeros(kind.shape)
        matrices = kind.cut(marks)
        for matrix in matrices:
            matrix.copy_(read(matrix) + 1)
        assert (marks == 1).all()


@pytest.mark.parametrize("path", KINDS)
def test_the_explanation_shows_the_matrices_and_their_scale(path):
    kind = KINDS[path]
    params = tree(torch.float32, [path])
    explanation = fmuon.explain(params, configured(**of(path)))
    (row,) = explanation.rows
    shapes = [tuple(read(matrix).shape) for matrix in kind.cut(params[path])]
    # "k x" for the stack axes, "(n blocks)" for equal blocks.
    shown = Counter()
    for entry in row.matrices.split(", "):
        entry, _, blocks = entry.partition(" (")
        *stack, fan_out, fan_in = map(int, entry.split(" x "))
        shown[fan_out, fan_in] += math.prod(stack) * int(blocks.split()[0] if blocks else 1)
    assert shown == Counter(shapes)
    assert row.shape == kind.shape and row.gets == "muon"
    assert float(row.scale) == pytest.approx(references.SCALES["original"](*shapes[0]), rel=1e-3)
    stacks = Counter((min(shape), max(shape)) for shape in shapes)
    listed = ", ".join(f"{count} of {m} x {n}" for (m, n), count in sorted(stacks.items()))
    assert f"stacks: {listed}, by " in explanation.summary


# What inductor sees differently; each adds seconds to its compilation.
COMPILED = (
    "grouped_qkv",
    "grid",
    "in_out_qkv",
    "gate_up_experts",
    "last_axis_experts",
    "conv2d_channels_last",
    "grouped_conv",
    "transposed_conv",
    "strided_experts",
    "lora_a",
    "lora_b",
)


@pytest.mark.parametrize(("backend", "names"), [("inductor", COMPILED), ("aot_eager", KINDS)])
def test_many_of_them_compiled_are_as_eager(backend, names):
    """In one tree, where blocks and experts of one shape meet in one stack."""
    opt = configured(orthogonalize=fmuon.NewtonSchulz(dtype="float32"), **of(*names))
    params = tree(torch.float32, names)
    state = opt.init(params)
    compiled = fmuon.compile(opt.update, mode="default", backend=backend)
    for step in range(STEPS):
        grads = tree(torch.float32, names)
        expected = opt.update(grads, state, step, params)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            updates, state = compiled(grads, state, step, params)
        assert_close((updates, state), expected, rtol=1e-4, atol=1e-5)
        for path, param in params.items():
            assert updates[path].stride() == state["momentum"][path].stride() == param.stride()
        params = fmuon.apply_updates(params, updates)


def test_the_shim_moves_all_of_them_by_the_same_bits():
    options = {"orthogonalize": fmuon.NewtonSchulz(dtype="float32"), "scale": "original"}
    params = tree(torch.float32)
    leaves = {path: torch.nn.Parameter(p.clone()) for path, p in params.items()}
    optimizer = fmuon.FMuon(
        leaves.items(), LR, momentum=MOMENTUM, weight_decay=DECAY, labels=LABELS, **options
    )
    opt = configured(**options)
    state = opt.init(params)
    for step in range(STEPS):
        grads = tree(torch.float32)
        for path, leaf in leaves.items():
            leaf.grad = grads[path].clone()
        optimizer.step()
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
    for path, leaf in leaves.items():
        assert torch.equal(leaf, params[path]), path
        buffer = optimizer.state[leaf]["momentum_buffer"]
        assert torch.equal(buffer, state["momentum"][path])
        assert buffer.stride() == leaf.stride()


# ---- blocks and leaves in one stack --------------------------------------------------------------


@pytest.mark.parametrize("side", [8, 64])
@pytest.mark.parametrize("other", [False, True])
def test_a_fused_projection_has_the_bits_of_three_matrices(side, other):
    """Alone, and in a stack with a fourth matrix."""
    names = ("q", "k", "v")
    separate = {name: torch.randn(side, side) for name in names}
    separate |= {"o": torch.randn(side, side)} if other else {}

    def fuse(leaves):
        fused = {"qkv": torch.cat([leaves[name] for name in names])}
        return fused | {k: leaf for k, leaf in leaves.items() if k not in names}

    fused = fuse(separate)
    plain = fmuon.muon(0.1, weight_decay=0.1)
    blocks = fmuon.muon(0.1, weight_decay=0.1, labels={"qkv": Matrix(blocks=(side,) * 3)})
    state, state_of_fused = plain.init(separate), blocks.init(fused)
    for step in range(STEPS):
        grads = {name: torch.randn_like(leaf) for name, leaf in separate.items()}
        updates, state = plain.update(grads, state, step, separate)
        own, state_of_fused = blocks.update(fuse(grads), state_of_fused, step, fused)
        for path, update in fuse(updates).items():
            assert torch.equal(own[path], update)
            assert torch.equal(state_of_fused["momentum"][path], fuse(state["momentum"])[path])
        separate = fmuon.apply_updates(separate, updates)
        fused = fmuon.apply_updates(fused, own)


def test_blocks_experts_and_leaves_of_one_shape_are_one_stack():
    seen = []

    def recording(x):
        seen.append(tuple(x.shape))
        return x

    params = {
        "qkv": torch.randn(16, 8),
        "down": torch.randn(8, 4),
        "up": torch.randn(4, 8),
        "experts": torch.randn(3, 4, 8),
        "conv": torch.randn(4, 4, 2),
    }
    labels = {
        "qkv": Matrix(blocks=(8, 4, 4)),
        "experts": Matrix(1, 2),
        "conv": Matrix(0, (1, 2)),
    }
    opt = fmuon.muon(labels=labels, orthogonalize=recording)
    opt.update(params, opt.init(params), 0)
    assert sorted(seen) == [(1, 8, 8), (2 + 1 + 1 + 3 + 1, 4, 8)]
    summary = fmuon.explain(params, fmuon.muon(labels=labels)).summary
    assert "stacks: 8 of 4 x 8, 1 of 8 x 8, by " in summary


# ---- adapters ------------------------------------------------------------------------------------


def test_the_first_step_of_an_adapter_whose_b_is_zero():
    """The gradient of A is exactly zero, since B is; A stays, B moves, nothing is NaN."""
    x, base = torch.randn(16, 60), torch.randn(60, 60)
    params = {"a": torch.randn(2, 60), "b": torch.zeros(60, 2)}
    start = copy.deepcopy(params)

    def loss_of(params):
        return (x @ (base + params["b"] @ params["a"]).T).square().mean()

    opt = fmuon.muon(0.1)
    state = opt.init(params)
    for step in range(2):
        grads = torch.func.grad(loss_of)(params)
        updates, state = opt.update(grads, state, step, params)
        params = fmuon.apply_updates(params, updates)
        assert all(leaf.isfinite().all() for leaf in params.values())
        assert torch.equal(params["a"], start["a"]) == (step == 0)
        assert params["b"].any()


def test_depthwise_convolutions_are_auxiliary_unless_a_view_is_declared():
    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Conv1d(8, 8, 3, groups=8, bias=False)
            self.project = torch.nn.Linear(8, 8, bias=False)

    model = Mixer()
    gets = [row.gets for row in fmuon.explain(model).rows]
    assert gets == ["adamw", "muon"]
    labels = fmuon.label(model) | {"mix.weight": Matrix(0, (1, 2))}
    declared, _ = fmuon.explain(model, fmuon.muon(labels=labels)).rows
    assert (declared.gets, declared.matrices) == ("muon", "8 x 3")
    optimizer = fmuon.FMuon(model, lr=0.1, labels=labels)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = model.mix.weight.detach().clone()
    optimizer.step()
    update = (model.mix.weight.detach() - before).flatten(1) / -0.1 / (0.2 * 8**0.5)
    assert torch.linalg.svdvals(update).sub(1).abs().max() < 0.35


@pytest.mark.parametrize("shape", [(4, 1, 3), (1, 4, 3), (4, 3, 1), (1, 1, 4)])
@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_strides_of_axes_of_length_1_stay_and_compile_once(shape, order):
    inverse = [order.index(axis) for axis in range(3)]
    params = {"w": torch.randn(shape).permute(order).contiguous().permute(inverse)}
    opt = fmuon.muon(0.1, labels={"w": Matrix(0, (1, 2))})
    counter = CompileCounterWithBackend("eager")

    def step_of(params, grads, state, step):
        updates, state = opt.update(grads, state, step, params)
        return fmuon.apply_updates(params, updates), state

    compiled = fmuon.compile(step_of, backend=counter)
    state, strides = opt.init(params), params["w"].stride()
    for step in range(3):
        params, state = compiled(params, {"w": torch.randn_like(params["w"])}, state, step)
        assert params["w"].stride() == state["momentum"]["w"].stride() == strides
    assert counter.frame_count == 1
