# SPDX-License-Identifier: Apache-2.0
"""The kernels on a CPU, in the interpreter of Triton; run by test_symmetric.py."""

import os

import pytest
import torch
from torch import library

import fmuon
from fmuon import symmetric
from fmuon.symmetric import lower_tiles

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_symmetric.py, which sets it"

# One rounding of the result; in float32, sums of up to 200 products in any order.
TOLERANCES = {torch.float32: 2e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# A tile is 128 x 128, and 64 or 32 deep.
SHAPES = [(1, 128, 64), (2, 130, 70), (3, 5, 7), (1, 257, 33), (2, 1, 200), (1, 256, 128)]

every_dtype = pytest.mark.parametrize("dtype", TOLERANCES)


def off(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


def polynomials_of_one(side, dtype, count):
    """Symmetric matrices that commute, as those of the iteration do, but for their rounding."""
    x = torch.randn(2, side, side, dtype=torch.float64) / side**0.5
    gram = x @ x.mT
    return [torch.linalg.matrix_power(gram, power + 1).to(dtype) for power in range(count)]


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gram_matrix(shape, dtype):
    x = torch.randn(shape).to(dtype)
    result = lower_tiles(x, x.mT)
    assert result.dtype == dtype and result.is_contiguous()
    assert torch.equal(result, result.mT)
    assert off(result, x.double() @ x.double().mT) < TOLERANCES[dtype]


@every_dtype
def test_any_strides(dtype):
    whole = torch.randn(3, 300, 140).to(dtype)
    for x in (whole.mT, whole[1:, ::2, 3:90], whole[:1].expand(2, -1, -1)):
        assert torch.equal(lower_tiles(x, x.mT), lower_tiles(x.contiguous(), x.contiguous().mT))


@every_dtype
@pytest.mark.parametrize(("beta", "alpha"), [(-4.775, 2.0315), (3.4445, 1.0), (0.0, -1.0)])
def test_an_addend_and_factors(dtype, beta, alpha):
    addend, left, right = polynomials_of_one(131, dtype, 3)
    result = lower_tiles(left, right, addend, beta, alpha)
    exact = torch.baddbmm(*(x.double() for x in (addend, left, right)), beta=beta, alpha=alpha)
    assert torch.equal(result, result.mT)
    # The product of two rounded matrices isn't quite symmetric: that is lost beside its rounding.
    assert off(result, exact) < 2 * TOLERANCES[dtype]


def test_an_addend_with_strides_of_its_own():
    x, addend = torch.randn(2, 129, 40), torch.randn(2, 129, 258)[:, :, ::2]
    addend = addend.tril() + addend.tril(-1).mT
    assert torch.equal(
        lower_tiles(x, x.mT, addend.mT, 2.0, 1.0), lower_tiles(x, x.mT, addend, 2.0, 1.0)
    )


def test_a_bad_matrix_leaves_the_others_of_its_stack_alone():
    x = torch.randn(3, 130, 20)
    clean = lower_tiles(x, x.mT)
    x[1, 129, 19] = torch.nan
    result = lower_tiles(x, x.mT)
    assert torch.equal(result[[0, 2]], clean[[0, 2]]) and result[1].isnan().any()


def test_the_operator_keeps_what_it_promises_to_graphs():
    x = torch.randn(2, 130, 70)
    addend = x @ x.mT
    for arguments in ((x, x.mT), (x, x.mT, addend, 0.5, 2.0)):
        library.opcheck(torch.ops.fmuon.lower_tiles.default, arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", [fmuon.NewtonSchulz, fmuon.GramNewtonSchulz])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_iterations_are_as_near_as_with_plain_products(monkeypatch, form, dtype, compiled):
    u, v = (torch.linalg.qr(torch.randn(n, 140, dtype=torch.float64)).Q for n in (140, 300))
    x = (u * torch.logspace(0, -3, 140, dtype=torch.float64)) @ v.mT
    exact = fmuon.NewtonSchulz()(x)
    method = form(dtype=dtype)
    plain = off(method(x.float()), exact)
    monkeypatch.setattr(symmetric, "takes_kernel", lambda *operands: True)
    if compiled:
        method = torch.compile(method, fullgraph=True, backend="aot_eager")
    assert off(method(x.float()), exact) < 1.5 * plain
