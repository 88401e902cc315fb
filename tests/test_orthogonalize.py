# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from expecttest import assert_expected_inline
from references import newton_schulz, polar, scalar_response
from torch.testing import assert_close

import fmuon
from fmuon.coefficients import COEFFICIENTS
from fmuon.orthogonalize import NORMALIZATIONS, _restarts

EXACT = fmuon.NewtonSchulz(dtype=torch.float32)
# Five steps of three products each in float32 on values of order 1.
NS_TOLERANCE = 30 * torch.finfo(torch.float32).eps


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def hadamard(n):
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(n)


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(7, 7), (5, 12), (12, 5), (1, 9), (9, 1), (1, 1)])
def test_follows_the_formula_for_every_coefficient_set(name, shape):
    x = torch.randn(shape, dtype=torch.float64)
    family = COEFFICIENTS[name]
    expected = newton_schulz(x, family.polynomials(), family.norm_safety)
    method = fmuon.NewtonSchulz(name, eps=0.0)
    assert_close(method(x), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("shape", [(8, 12), (8, 40), (40, 8), (3, 4, 20), (1, 5)])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_the_gram_form_is_the_same_function(name, shape):
    x = torch.randn(shape, dtype=torch.float64)
    # It amplifies rounding by up to the square of the slope at 0, about 1e6.
    assert_close(fmuon.GramNewtonSchulz(name)(x), fmuon.NewtonSchulz(name)(x), rtol=1e-8, atol=1e-9)


def test_the_gram_form_needs_the_long_side_twice_for_each_start():
    products = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "bmm" in function.__name__:
                products.append(max(a.shape[-1] for a in args))
            return function(*args, **(kwargs or {}))

    for shape, dtype, long in (
        ((8, 64), "float32", 2),
        ((8, 10), "float32", 10),
        ((8, 64), "float16", 4),
        ((8, 64), "bfloat16", 6),
        ((8, 10), "bfloat16", 10),
    ):
        products.clear()
        with Counting():
            fmuon.GramNewtonSchulz(dtype=dtype)(torch.randn(shape))
        assert products.count(max(shape)) == long


def decaying(last):
    """Singular values from 1 to `last`, evenly spaced in the logarithm; 32 x 128 in float64."""
    u, v = (torch.linalg.qr(torch.randn(n, 32, dtype=torch.float64)).Q for n in (32, 128))
    return (u * torch.logspace(0, last, 32, dtype=torch.float64)) @ v.T


def test_the_gram_form_is_accurate_in_float32_on_a_decaying_spectrum():
    x = decaying(-3)
    exact = fmuon.NewtonSchulz()(x)
    assert relative(fmuon.GramNewtonSchulz(dtype="float32")(x.float()), exact) < 3e-3


@pytest.mark.parametrize("name", ["jordan", "polar_express"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("last", [-3, -7])
def test_restarts_keep_the_gram_form_near_the_standard_form_in_16_bits(name, dtype, last):
    x = decaying(last)
    exact = fmuon.NewtonSchulz(name)(x)
    standard = relative(fmuon.NewtonSchulz(name, dtype=dtype)(x.float()), exact)
    form = fmuon.GramNewtonSchulz(name, dtype=dtype)
    # One restart in float16 was measured up to 3.5 times as far off as the standard form.
    allowed = {"float16": 4, "bfloat16": 2}[dtype]
    assert relative(form(x.float()), exact) < allowed * standard
    without = fmuon.GramNewtonSchulz(name, dtype=dtype, restarts=())
    assert not relative(without(x.float()), exact) < 10 * standard


@pytest.mark.parametrize(
    ("name", "dtype", "restarts"),
    [
        ("jordan", torch.float32, ()),
        ("polar_express", torch.float32, ()),
        ("polar_express", torch.float16, (2,)),
        ("polar_express", torch.bfloat16, (1, 3)),
        ("jordan", torch.bfloat16, (2, 4)),
    ],
)
def test_where_an_eigenvalue_of_minus_one_roundoff_would_take_over(name, dtype, restarts):
    roundoff, polynomials = torch.finfo(dtype).eps / 2, COEFFICIENTS[name].polynomials()
    assert _restarts(polynomials, roundoff) == restarts
    # Followed exactly, between two restarts it stays small.
    value = -roundoff
    for step, (a, b, c) in enumerate(polynomials):
        value = -roundoff if step in restarts else value
        assert abs(value) < 0.2
        value = value * (a + b * value + c * value**2) ** 2


@pytest.mark.parametrize("restarts", ["never", (0,), (5,), (3, 2), (2, 2)])
def test_impossible_restarts_are_refused(restarts):
    with pytest.raises(fmuon.ConfigurationError, match="restarts="):
        fmuon.GramNewtonSchulz(restarts=restarts)


@pytest.mark.parametrize("shape", [(7, 7), (5, 12), (12, 5), (1, 9), (3, 4, 6)])
def test_the_exact_method_gives_the_polar_factor(shape):
    x = torch.randn(shape, dtype=torch.float64)
    assert_close(fmuon.PolarSVD()(x), polar(x))


def test_the_exact_method_leaves_out_what_is_not_there():
    u, v = torch.randn(6, 2, dtype=torch.float64), torch.randn(2, 9, dtype=torch.float64)
    x = torch.stack([u @ v, torch.zeros(6, 9, dtype=torch.float64)])
    result = fmuon.PolarSVD()(x)
    # A partial isometry of rank two, and nothing.
    assert_close(torch.linalg.svdvals(result[0])[:3], torch.tensor([1.0, 1.0, 0.0]).double())
    assert torch.equal(result[1], torch.zeros(6, 9, dtype=torch.float64))
    x[1, 2, 3] = torch.nan
    assert torch.equal(fmuon.PolarSVD()(x)[0], result[0]) and fmuon.PolarSVD()(x)[1].isnan().all()


@pytest.mark.parametrize("n", [4, 16, 64, 256])
@pytest.mark.parametrize("factor", [1.0, -3e-5, 7e4])
def test_an_orthogonal_matrix_is_multiplied_by_the_scalar_response(n, factor):
    expected = {4: 0.765439, 16: 0.714526, 64: 0.688140, 256: 1.070524}[n]
    assert scalar_response(n**-0.5) == pytest.approx(expected, rel=2e-6)
    result = EXACT(factor * hadamard(n))
    assert_close(result, math.copysign(expected, factor) * hadamard(n), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("power", [-40, -38, -30, -23, -12, -7, 0, 10, 19, 30, 37])
def test_the_result_does_not_depend_on_the_scale(power):
    x = torch.randn(24, 16)
    # Below 1e-38 the input itself has fewer bits than float32 has.
    bits = NS_TOLERANCE if power > -37 else 16 * 1.4e-45 / 10.0**power
    scaled = (x.double() * 10.0**power).float()
    assert relative(EXACT(scaled), EXACT(x)) < max(bits, NS_TOLERANCE)


def test_members_of_a_stack_have_scales_of_their_own():
    x = torch.randn(24, 16)
    stacked = EXACT(torch.stack([x * 1e-30, x, x * 1e30, torch.zeros(24, 16)]))
    for member in stacked[:3]:
        assert relative(member, EXACT(x)) < NS_TOLERANCE
    assert torch.equal(stacked[3], torch.zeros(24, 16))


def test_zero_gives_exactly_zero():
    assert torch.equal(EXACT(torch.zeros(3, 5, 4)), torch.zeros(3, 5, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_matrix_leaves_the_others_of_its_stack_alone(bad):
    x = torch.randn(4, 32, 48)
    clean = EXACT(x)
    x[1, 3, 5] = bad
    result = EXACT(x)
    assert torch.equal(result[[0, 2, 3]], clean[[0, 2, 3]])
    assert result[1].isnan().any()


def test_the_input_is_not_written():
    x = torch.randn(6, 4)
    before = x.clone()
    EXACT(x)
    assert torch.equal(x, before)


def test_takes_any_leading_axes_strides_and_no_elements():
    x = torch.randn(2, 3, 6, 4)
    result = EXACT(x)
    assert result.shape == x.shape
    assert_close(result[1, 2], EXACT(x[1, 2]), rtol=1e-4, atol=1e-5)
    strided = x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    assert_close(EXACT(strided), result, rtol=1e-4, atol=1e-5)
    assert EXACT(torch.empty(0, 5)).shape == (0, 5)
    assert EXACT(torch.empty(3, 4, 0)).shape == (3, 4, 0)


def test_rank_one_in_float32_keeps_the_direction():
    x = torch.randn(64, 1) @ torch.randn(1, 96)
    result = EXACT(x)
    cosine = (result * x).sum() / result.norm() / x.norm()
    assert cosine > 0.99999
    assert result.norm().item() == pytest.approx(scalar_response(1.0), rel=1e-4)


@pytest.mark.parametrize("name", ["polar_express", "cans", "you"])
def test_better_sets_come_nearer_to_the_polar_factor(name):
    x = torch.randn(64, 192, dtype=torch.float64)
    error = relative(fmuon.NewtonSchulz(name)(x), polar(x))
    assert error < relative(fmuon.NewtonSchulz("jordan")(x), polar(x))


def test_bfloat16_is_near_float32_on_a_full_rank_matrix():
    x = torch.randn(16, 48)
    half = fmuon.NewtonSchulz(dtype=torch.bfloat16)(x)
    assert half.dtype == torch.float32
    # Fifteen products whose entries are rounded to 8 bits, amplified by a slope of up to 3.4 each.
    assert relative(half, EXACT(x)) < 15 * 2**-8


def test_norms_with_an_absolute_eps_shrink_tiny_matrices():
    x = torch.randn(8, 8, dtype=torch.float64)
    x = x / x.norm()
    for norm, divisor in (("add", 2e-7), ("clamp", 1e-7)):
        method = fmuon.NewtonSchulz("jordan", norm=norm, eps=1e-7)
        reference = newton_schulz(x, (), 1.0) * (1e-7 / divisor)
        for a, b, c in ((3.4445, -4.7750, 2.0315),) * 5:
            gram = reference @ reference.T
            reference = a * reference + (b * gram + c * gram @ gram) @ reference
        assert_close(method(x * 1e-7), reference, rtol=1e-9, atol=1e-12)


def test_more_steps_where_the_set_allows_them():
    x = torch.randn(9, 9, dtype=torch.float64)
    expected = newton_schulz(x, ((3.4445, -4.7750, 2.0315),) * 7)
    assert_close(fmuon.NewtonSchulz(steps=7, eps=0.0)(x), expected, rtol=1e-10, atol=1e-12)


def message(function, *args, **kwargs):
    with pytest.raises(fmuon.ConfigurationError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_errors_name_what_is_known():
    assert_expected_inline(
        message(fmuon.NewtonSchulz, "polar"),
        """unknown coefficients 'polar'; known: 'jordan', 'you', 'polar_express', 'polar_express_nanogpt', 'cans'""",
    )
    assert_expected_inline(
        message(fmuon.NewtonSchulz, "you", steps=4),
        """steps=4: this coefficient set is made for exactly 5 steps (You Jiacheng 2025, in leloykun.github.io/ponder/muon-opt-coeffs); leave steps=None or choose a set that can be extended""",
    )
    assert_expected_inline(
        message(fmuon.NewtonSchulz, steps=0),
        """steps=0: at least one Newton-Schulz step is needed""",
    )
    assert_expected_inline(
        message(fmuon.NewtonSchulz, norm="frob"),
        """unknown norm 'frob'; known: 'scale_free', 'add', 'clamp'""",
    )
    assert_expected_inline(
        message(fmuon.NewtonSchulz, dtype="bf16"),
        """unknown dtype 'bf16'; known: 'auto', 'float32', 'float64', 'bfloat16', 'float16'; did you mean 'bfloat16'?""",
    )
    assert_expected_inline(
        message(fmuon.NewtonSchulz, eps=-1.0),
        """eps=-1.0: give a number that is not negative and finite""",
    )
    assert_expected_inline(
        message(EXACT, torch.ones(3)),
        """can't orthogonalise a tensor of shape (3,); [..., rows, columns] needed""",
    )
    assert_expected_inline(
        message(fmuon.muon, orthogonalize=3),
        """orthogonalize=3: give a callable [..., m, n] -> [..., m, n] or one of 'newton_schulz', 'gram_newton_schulz', 'zolotarev', 'polar_svd', 'auto'""",
    )


# ---- normalizations ------------------------------------------------------------------------------


def normalised(x, kind):
    """X / |X| in float64, one matrix at a time; the rows of aol are those of the wide matrix."""
    wide = x.double() if x.shape[0] <= x.shape[1] else x.double().T
    gram = wide @ wide.T
    size = {
        "frobenius": lambda: wide.norm(),
        "spectral": lambda: torch.linalg.svdvals(wide)[0],
        "schatten": lambda: (torch.linalg.svdvals(wide) ** 4).sum() ** 0.25,
        "aol": lambda: gram.abs().sum(1, keepdim=True).sqrt(),
    }[kind]()
    return wide / size


@pytest.mark.parametrize("kind", NORMALIZATIONS)
@pytest.mark.parametrize("norm", ["scale_free", "add", "clamp"])
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (4, 4), (1, 6)])
def test_every_normalization_follows_its_formula(kind, norm, shape):
    x = torch.randn(shape, dtype=torch.float64)
    expected = normalised(x, kind)
    for a, b, c in COEFFICIENTS["jordan"].polynomials():
        gram = expected @ expected.T
        expected = a * expected + (b * gram + c * gram @ gram) @ expected
    method = fmuon.NewtonSchulz(eps=0.0, norm=norm, normalization=kind)
    assert_close(method(x), expected if shape[0] <= shape[1] else expected.T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_every_normalization_bounds_the_singular_values_by_one(kind):
    for shape in ((6, 6), (6, 30), (1, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        assert torch.linalg.svdvals(normalised(x, kind)).max() <= 1 + 1e-12


@pytest.mark.parametrize("kind", NORMALIZATIONS)
@pytest.mark.parametrize("method", [fmuon.NewtonSchulz, fmuon.GramNewtonSchulz])
def test_every_normalization_takes_any_scale_zero_and_nan(kind, method):
    orthogonalise = method(dtype="float32", normalization=kind)
    x = torch.randn(4, 9)
    expected = orthogonalise(x)
    for power in (-36, -20, 18, 37):
        assert_close(orthogonalise(x * 10.0**power), expected, rtol=1e-3, atol=1e-3)
    stack = torch.stack([x, torch.zeros(4, 9), x])
    stack[2, 1, 1] = float("inf")
    found = orthogonalise(stack)
    assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1], torch.zeros(4, 9))
    assert found[2].isnan().any()


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_the_safety_factor_is_that_of_the_norm(kind):
    x = torch.randn(4, 7, dtype=torch.float64)
    family = COEFFICIENTS["polar_express"]
    expected = normalised(x, kind) / family.norm_safety
    for a, b, c in family.polynomials():
        gram = expected @ expected.T
        expected = a * expected + (b * gram + c * gram @ gram) @ expected
    method = fmuon.NewtonSchulz("polar_express", eps=0.0, normalization=kind)
    assert_close(method(x), expected, rtol=1e-9, atol=1e-10)
