# SPDX-License-Identifier: Apache-2.0
"""Which products are plain ones, to the bit; the kernel itself is in interpreted_kernels.py."""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fmuon
from fmuon import symmetric
from fmuon.coefficients import COEFFICIENTS

ROOT = Path(__file__).parent.parent
SIDE = symmetric.SMALLEST_SIDE


def on_a_gpu(k=2, m=SIDE, n=SIDE + 8, dtype=torch.bfloat16):
    return torch.empty(k, m, n, dtype=dtype, device="cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of a GPU that isn't there: they have all but values."""
    monkeypatch.setattr(symmetric, "has_kernel", lambda device: device.type == "cuda")
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_products_are_those_of_torch_to_the_bit(dtype):
    x = torch.randn(2, SIDE + 1, SIDE + 9).to(dtype)
    a = x @ x.mT
    assert torch.equal(symmetric.product(x, x.mT), a)
    expected = torch.baddbmm(a, a, a, beta=-4.775, alpha=2.0315)
    assert torch.equal(symmetric.baddbmm(a, a, a, beta=-4.775, alpha=2.0315), expected)


def test_on_a_cpu_newton_schulz_is_its_formula_to_the_bit():
    x = torch.randn(1, SIDE + 1, SIDE + 9)
    x = expected = x / x.norm()
    polynomials = COEFFICIENTS["jordan"].polynomials()
    for a, b, c in polynomials:
        gram = expected @ expected.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        expected = torch.baddbmm(expected, polynomial, expected, beta=a)
    assert torch.equal(fmuon.NewtonSchulz(dtype="float32")._products(x, polynomials), expected)


def test_the_kernel_is_taken_on_a_gpu_in_16_bits_from_a_side_on(gpu):
    assert symmetric.takes_kernel(on_a_gpu())
    assert symmetric.takes_kernel(on_a_gpu(dtype=torch.float16))
    assert not symmetric.takes_kernel(on_a_gpu(dtype=torch.float32))
    assert not symmetric.takes_kernel(on_a_gpu(m=SIDE - 1))
    assert not symmetric.takes_kernel(torch.empty(2, SIDE, SIDE, dtype=torch.bfloat16))


def test_where_a_derivative_or_a_transform_is_at_work_the_product_is_the_plain_one(gpu):
    seen = []

    def ask(y):
        # torch without CUDA can't transform a tensor of a GPU, so a number is.
        seen.append(symmetric.takes_kernel(x))
        return y.sum()

    x, y = on_a_gpu(), torch.ones(2)
    assert not symmetric.takes_kernel(x, on_a_gpu().requires_grad_())
    torch.func.vmap(ask)(y)
    torch.func.grad(ask)(y)
    torch.func.jvp(ask, (y,), (y,))
    with torch.autograd.forward_ad.dual_level():
        ask(y)
    ask(y)
    assert seen == [False, False, False, False, True]


def test_traces_ask_for_transforms_too():
    def ask(x):
        return x * (2 if symmetric.is_transformed() else 3)

    one = torch.ones(2, 2)
    compiled = torch.compile(ask, fullgraph=True, backend="eager")
    assert torch.equal(compiled(one), 3 * one)
    mapped = torch.compile(torch.func.vmap(ask), fullgraph=True, backend="eager")
    assert torch.equal(mapped(one), 2 * one)


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize(
    ("memory", "enough"),
    [({}, False), *(({"shared_memory_per_block_optin": k * 1024}, k > 128) for k in (99, 163))],
)
def test_there_is_a_kernel_where_triton_and_room_for_its_tiles_are(
    monkeypatch, has_triton, memory, enough
):
    found = object() if has_triton else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    properties = types.SimpleNamespace(**memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert symmetric.has_kernel(torch.device("cuda")) == (has_triton and enough)


@pytest.mark.parametrize("method", [fmuon.NewtonSchulz, fmuon.GramNewtonSchulz])
def test_without_a_kernel_a_gpu_takes_the_plain_products(gpu, monkeypatch, method):
    calls = []

    class Recording(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function.__name__.split(".")[0])
            return function(*args, **(kwargs or {}))

    x = on_a_gpu(n=2 * SIDE)
    orthogonalise = method(dtype="bfloat16")
    with Recording():
        orthogonalise(x)
    # NewtonSchulz multiplies by X five times; the Gram form once for each of its three starts.
    plain = 5 if method is fmuon.NewtonSchulz else 3
    assert calls.count("lower_tiles") >= 10 and calls.count("baddbmm") + calls.count("bmm") == plain
    calls.clear()
    monkeypatch.setattr(symmetric, "has_kernel", lambda device: False)
    with Recording():
        orthogonalise(x)
    assert "lower_tiles" not in calls and calls.count("baddbmm") >= 10


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed; `make test-kernels` runs this in its interpreter",
)
def test_the_kernels_in_the_interpreter_of_triton():
    # Triton reads the variable when the kernel is decorated.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-x", "tests/interpreted_kernels.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
