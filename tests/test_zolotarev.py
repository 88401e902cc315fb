# SPDX-License-Identifier: Apache-2.0
"""The rational methods beside the scalar function on singular values."""

import pytest
import torch
from references import polar
from torch.testing import assert_close

import fmuon
from fmuon import Zolotarev
from fmuon.rational import Rational
from fmuon.symmetric import (
    frobenius_of_lower,
    gram,
    lower_blocks,
    lower_gram,
    lower_sum_of_grams,
    sum_of_grams,
    symmetric_whole,
)
from fmuon.zolotarev import inverse_factors


def by_values(x, method):
    """U f(S / norm) V^T in float64, the norm being the Schatten-4 norm of X."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    norm = s.pow(4).sum(-1, keepdim=True).pow(0.25)
    f = torch.tensor(
        [[method.function(v) for v in row] for row in (s / norm).reshape(-1, s.shape[-1]).tolist()],
        dtype=torch.float64,
    )
    return (u * f.view_as(s).unsqueeze(-2)) @ vh


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# Around the sides at which halves, blocks and base cases begin.
SIDES = [1, 2, 31, 32, 33, 40, 64, 65, 97, 127, 129, 200, 256, 259, 515]


@pytest.mark.parametrize("side", SIDES)
def test_singular_values_get_the_value_of_the_function(side):
    x = torch.randn(2, side, side + 7, dtype=torch.float64)
    for method in (Zolotarev(), Zolotarev(poles=3), Zolotarev(poles=1, lower=1e-2)):
        assert relative(method(x), by_values(x, method)) < 1e-10


@pytest.mark.parametrize("shape", [(9, 4), (2, 3, 5, 8), (1, 9), (9, 1)])
def test_takes_matrices_of_any_form(shape):
    x = torch.randn(shape, dtype=torch.float64)
    assert relative(Zolotarev()(x), by_values(x, Zolotarev())) < 1e-10
    assert Zolotarev()(torch.empty(3, 0, 4)).shape == (3, 0, 4)


def with_values(values, wide=2):
    side = len(values)
    u = torch.linalg.qr(torch.randn(side, side, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(wide * side, side, dtype=torch.float64)).Q
    return (u * values) @ v.T


def hard(side):
    """Matrices whose Gram matrix is nearly singular in float32."""
    steps = torch.linspace(0, 1, side, dtype=torch.float64)
    return {
        "exponential": with_values(10 ** (-5 * steps)),
        "down to 1e-12": with_values(10 ** (-12 * steps)),
        "harmonic": with_values(1 / torch.arange(1.0, side + 1, dtype=torch.float64)),
        "half tiny": with_values(torch.where(steps < 0.5, 1.0, 1e-6).double()),
        "rank one": torch.randn(side, 1).double() @ torch.randn(1, 2 * side).double(),
        "rank ten": torch.randn(side, 10).double() @ torch.randn(10, 2 * side).double(),
        "equal rows": torch.randn(2 * side).double().expand(side, -1).clone(),
        "ones": torch.ones(side, side, dtype=torch.float64),
        "far from zero": torch.randn(side, 2 * side).double() + 1000,
        "rows of all sizes": torch.randn(side, 2 * side).double() * 10 ** (-8 * steps)[:, None],
        "zero rows": torch.randn(side, 2 * side).double() * (steps < 0.5)[:, None],
    }


@pytest.mark.parametrize("side", [48, 160, 300])
@pytest.mark.parametrize("name", hard(12))
def test_float32_keeps_the_function_on_hard_matrices(side, name):
    torch.manual_seed(side)
    # As float32 sees it: what is asked is the error of the method, not of its input.
    x = hard(side)[name].float()
    for method, bound in ((Zolotarev(), 5e-3), (Zolotarev(poles=3), 1.5e-2)):
        assert relative(method(x), by_values(x, method)) < bound


@pytest.mark.parametrize("power", [-38, -20, 0, 19, 37])
def test_the_result_does_not_depend_on_the_scale(power):
    x = torch.randn(40, 64)
    scaled = (x.double() * 10.0**power).float()
    assert relative(Zolotarev()(scaled), Zolotarev()(x).double()) < 2e-4


def test_members_of_a_stack_are_on_their_own():
    x = torch.randn(5, 70, 90)
    clean = Zolotarev()(x)
    assert_close(clean[1], Zolotarev()(x[1]), rtol=1e-4, atol=1e-6)
    x[1, 3, 5], x[2, 0, 0], x[4] = float("nan"), float("inf"), 0
    result = Zolotarev()(x)
    assert torch.equal(result[[0, 3]], clean[[0, 3]])
    assert result[1].isnan().any() and result[2].isnan().any()
    assert torch.equal(result[4], torch.zeros(70, 90))


def test_a_matrix_that_cannot_be_factorised_gets_a_cubic_step():
    method = Zolotarev(poles=1, lower=1e-2)
    indefinite = Rational(1e-2, 1.0, 0.0, residues=(1.0,), shifts=(-0.5,), error=0.1)
    object.__setattr__(method, "function", indefinite)
    x = torch.randn(3, 4, dtype=torch.float64)
    scaled = x / (x @ x.T).norm().sqrt()
    assert_close(method._of_wide(x[None])[0], 1.5 * scaled - 0.5 * scaled @ scaled.T @ scaled)


def test_the_inverse_factors_are_those_of_cholesky():
    z = torch.randn(3, 100, 120, dtype=torch.float64)
    z = z @ z.mT
    factors, failed = inverse_factors(z)
    assert not failed.any()
    assert_close(factors, torch.linalg.cholesky(z).inverse())
    z[1, 70, 70] = -1
    _, failed = inverse_factors(z)
    assert (failed > 0).tolist() == [False, True, False]


@pytest.mark.parametrize("side", [5, 130, 256, 259, 520])
def test_symmetric_products_by_blocks(side):
    x = torch.randn(2, side, 30, dtype=torch.float64)
    assert_close(gram(x), x @ x.mT)
    factors = torch.randn(2, 3, side, side, dtype=torch.float64).tril()
    whole = (factors.mT @ factors).sum(1)
    assert_close(sum_of_grams(factors), whole)
    for half in (0, 3, side // 2):
        blocks = lower_gram(x, half)
        assert_close(symmetric_whole(blocks), x @ x.mT)
        assert_close(frobenius_of_lower(blocks), (x @ x.mT).norm(dim=(-2, -1), keepdim=True))
        assert_close(symmetric_whole(lower_sum_of_grams(lower_blocks(factors, half))), whole)


def test_differentiates_and_maps():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Zolotarev(lower=1e-1), x)
    y = torch.randn(3, 40, 50)
    assert_close(torch.vmap(Zolotarev())(y), Zolotarev()(y), rtol=1e-4, atol=1e-6)


def test_sixteen_bit_input_is_computed_in_float32():
    x = torch.randn(40, 60).bfloat16()
    assert_close(Zolotarev()(x), Zolotarev()(x.float()).bfloat16())


@pytest.mark.parametrize(
    ("options", "text"),
    [({"poles": 0}, "poles=0: give 1 to 8"), ({"lower": 1.0}, "lower=1.0: give a number from")],
)
def test_impossible_options_are_refused(options, text):
    with pytest.raises(fmuon.ConfigurationError, match=text):
        Zolotarev(**options)


def test_what_float32_cannot_hold_is_refused_by_name():
    method = Zolotarev(poles=4, lower=1e-4)
    x = torch.randn(9, 9, dtype=torch.float64)
    assert relative(method(x), by_values(x, method)) < 1e-8
    with pytest.raises(fmuon.ConfigurationError, match=r"shift .* take fewer poles or a larger"):
        method(torch.randn(9, 9))


@pytest.mark.parametrize(("poles", "quintic"), [(2, "jordan"), (3, "polar_express")])
def test_it_is_nearer_to_the_polar_factor_than_the_quintic(poles, quintic):
    x = torch.randn(4, 64, 128)
    other = fmuon.NewtonSchulz(quintic, dtype="float32")
    ours, theirs = (relative(m(x), polar(x.double())) for m in (Zolotarev(poles), other))
    assert ours < theirs
