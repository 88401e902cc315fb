# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math

import numpy as np
import pytest
from expecttest import assert_expected_inline
from references import PUBLISHED
from strategies import refusal

from fmuon import ConfigurationError
from fmuon.coefficients import COEFFICIENTS, CoefficientSet, coefficient_set

EPS = np.finfo(np.float64).eps
SINGULAR_VALUES = [*np.geomspace(1e-6, 1, 5_000).tolist(), *np.linspace(1e-3, 1, 10_000).tolist()]
EXTENDABLE = [name for name, family in COEFFICIENTS.items() if family.tail == "repeat"]
COMPLETE = [name for name, family in COEFFICIENTS.items() if family.tail == "none"]

# For every set in its own number of steps: the range of the response to singular values of at least
# 1e-3 and of at least 1e-2, when the norm is the exact largest singular value times the set's own
# safety factor. A set without a row here fails the tests, so a new one comes with its range.
BANDS = {
    "jordan": ((0.4705, 1.2024), (0.6818, 1.1344)),
    "you": ((0.4749, 1.1451), (0.9777, 1.0318)),
    "polar_express": ((0.8463, 1.1236), (0.8764, 1.1236)),
    "polar_express_nanogpt": ((0.8466, 1.1412), (0.8588, 1.1412)),
    "cans": ((0.8569, 1.1134), (0.8667, 1.1134)),
}


def value(triple, s):
    a, b, c = triple
    return a * s + b * s**3 + c * s**5


# ---- the response of a set -----------------------------------------------------------------------


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize(("least", "column"), [(1e-3, 0), (1e-2, 1)])
def test_the_response_fills_its_band(name, least, column):
    low, high = BANDS[name][column]
    responses = [COEFFICIENTS[name].response(s) for s in SINGULAR_VALUES if s >= least]
    assert low <= min(responses) < low + 1e-3
    assert high - 1e-3 < max(responses) <= high


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_the_response_to_the_smallest_singular_values_stays_between_zero_and_the_band(name):
    (_, high), _ = BANDS[name]
    assert all(0 < COEFFICIENTS[name].response(s) <= high for s in SINGULAR_VALUES)


# Measured once with another implementation: slope at 0 and range over s >= 1e-3.
@pytest.mark.parametrize(
    ("name", "changes", "slope", "low", "high"),
    [
        ("jordan", {}, 485, 0.471, 1.202),
        ("you", {}, 493, 0.475, 1.145),
        ("polar_express", {"norm_safety": 1.0}, 986, 0.852, 1.124),
        ("polar_express", {"norm_safety": 1.0, "safety": 1.0}, 1026, 0.876, 1.124),
        ("cans", {"norm_safety": 1.0, "safety": 1.0}, 1049, 0.884, 1.120),
    ],
)
def test_slope_and_range_agree_with_another_implementation(name, changes, slope, low, high):
    family = dataclasses.replace(COEFFICIENTS[name], **changes)
    responses = [family.response(s) for s in SINGULAR_VALUES if s >= 1e-3]
    assert family.response(1e-9) / 1e-9 == pytest.approx(slope, abs=0.5)
    assert min(responses) == pytest.approx(low, abs=5e-4)
    assert max(responses) == pytest.approx(high, abs=5e-4)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_the_slope_at_zero_is_the_product_of_the_first_coefficients(name):
    family = COEFFICIENTS[name]
    slope = math.prod(a for a, _, _ in family.polynomials())
    # Cubic terms add a relative 1e-12 or so at 1e-9.
    assert family.response(1e-9 * family.norm_safety) / 1e-9 == pytest.approx(slope, rel=1e-9)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_a_norm_that_is_too_small_by_a_thousandth_does_not_blow_up(name):
    (low, high), _ = BANDS[name]
    assert all(low <= COEFFICIENTS[name].response(s) <= high for s in np.linspace(1, 1.001, 101))


@pytest.mark.parametrize("name", ["polar_express", "cans"])
def test_without_its_safety_factors_such_a_norm_does_blow_up(name):
    bare = dataclasses.replace(COEFFICIENTS[name], safety=1.0, norm_safety=1.0)
    assert abs(bare.response(1.001)) > 1e3


def test_more_steps_of_polar_express_converge_to_one():
    family = COEFFICIENTS["polar_express"]
    responses = [family.response(s, steps=10) for s in SINGULAR_VALUES if s >= 1e-3]
    assert max(abs(r - 1) for r in responses) < 1e-12


# ---- the polynomials of a set --------------------------------------------------------------------


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_every_polynomial_but_the_last_is_the_published_one_at_a_smaller_argument(name):
    family = COEFFICIENTS[name]
    polynomials = family.polynomials()
    published = (family.published * 5)[: len(polynomials)]
    for s in np.linspace(0, 2, 21):
        for polynomial, raw in zip(polynomials[:-1], published[:-1], strict=True):
            terms = sum(abs(x) * s**k for x, k in zip(raw, (1, 3, 5), strict=True))
            expected = value(raw, s / family.safety)
            assert value(polynomial, s) == pytest.approx(expected, abs=16 * EPS * terms)
    assert polynomials[-1] == published[-1]


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_no_step_count_means_five_steps(name):
    assert COEFFICIENTS[name].polynomials() == COEFFICIENTS[name].polynomials(5)
    assert len(COEFFICIENTS[name].polynomials()) == 5


def test_a_single_polynomial_may_be_repeated_any_number_of_times():
    jordan = COEFFICIENTS["jordan"]
    assert [jordan.polynomials(n) for n in (1, 3, 7)] == [jordan.published * n for n in (1, 3, 7)]


def test_steps_beyond_the_published_ones_repeat_the_last_one():
    family = COEFFICIENTS["polar_express"]
    f = family.safety
    a, b, c = family.published[-1]
    assert family.polynomials(10)[7:] == ((a / f, b / f**3, c / f**5),) * 2 + ((a, b, c),)


@pytest.mark.parametrize("name", EXTENDABLE)
def test_an_extendable_set_takes_one_step_more(name):
    assert len(COEFFICIENTS[name].polynomials(6)) == 6


@pytest.mark.parametrize("name", COMPLETE)
@pytest.mark.parametrize("steps", [4, 6])
def test_a_complete_set_takes_no_other_count(name, steps):
    with pytest.raises(ConfigurationError, match="made for exactly 5 steps"):
        COEFFICIENTS[name].polynomials(steps)


def test_the_refusal_of_another_count_says_what_to_do():
    assert_expected_inline(
        refusal(ConfigurationError, COEFFICIENTS["you"].polynomials, 4),
        """\
steps=4: this coefficient set is made for exactly 5 steps (You Jiacheng 2025, in
leloykun.github.io/ponder/muon-opt-coeffs); leave steps=None or choose a set
that can be extended""",
    )


def test_fewer_steps_than_the_set_needs_are_refused():
    assert_expected_inline(
        refusal(ConfigurationError, COEFFICIENTS["polar_express"].polynomials, 3),
        """\
steps=3: this coefficient set needs at least 5 steps (Amsel et al. 2025, arXiv
2505.16932, Algorithm 1); leave steps=None for 5""",
    )


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_zero_steps_are_refused(name):
    with pytest.raises(ConfigurationError, match="steps=0: at least one Newton-Schulz step"):
        COEFFICIENTS[name].polynomials(0)


def test_an_unknown_set_is_answered_with_the_names():
    assert_expected_inline(
        refusal(ConfigurationError, coefficient_set, "polar_expres"),
        """\
unknown coefficients 'polar_expres'; known: 'jordan', 'you', 'polar_express',
'polar_express_nanogpt', 'cans'; did you mean 'polar_express' or
'polar_express_nanogpt'?""",
    )


def test_a_set_of_ones_own_is_taken_as_it_is():
    own = CoefficientSet(((1.5, -0.5, 0.0),), source="the cubic", tail="repeat", minimum=12)
    assert coefficient_set(own) is own
    assert own.response(0.1) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_a_set_is_hashable_and_says_where_it_comes_from(name):
    assert hash(COEFFICIENTS[name]) == hash(dataclasses.replace(COEFFICIENTS[name]))
    assert any(year in COEFFICIENTS[name].source for year in ("2024", "2025"))


# ---- births --------------------------------------------------------------------------------------
#
# Among the odd polynomials of degree 5 the best approximation of 1 on [low, high] is the one whose
# error takes its largest size four times with alternating signs: at both ends and at two points in
# between. Remez: solve for the polynomial and the size with guessed points, move them to the
# extrema, repeat.


def best_quintic(low, high):
    """The triple and the size of its error; quadratic convergence, so 40 rounds are plenty."""
    inner = (3 * low + high) / 4, (low + 3 * high) / 4
    signs = np.array([1, -1, 1, -1])
    for _ in range(40):
        x = np.array([low, *inner, high])
        system = np.stack([x, x**3, x**5, signs], axis=1)
        a, b, c, error = np.linalg.solve(system, np.ones(4))
        # The roots of the derivative, a + 3 b x^2 + 5 c x^4.
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return (a, b, c), error, (low, *inner, high), np.linalg.cond(system)


@pytest.mark.parametrize("low", [1e-3, 0.1, 0.8])
def test_the_solver_used_below_finds_an_error_that_alternates(low):
    triple, error, points, _ = best_quintic(low, 1.0)
    errors = [1 - value(triple, x) for x in points]
    assert errors == pytest.approx([error, -error, error, -error], abs=1e-12)
    inside = np.linspace(low, 1.0, 10_001)
    assert np.abs(1 - value(triple, inside)).max() <= error + 1e-12


def test_polar_express_is_the_greedy_composition_of_best_quintics():
    """Algorithm 1 of its paper, from l = 1e-3 and u = 1, with a cushion.

    Where l is below the cushion, the best polynomial for [cushion u, u] is taken and multiplied so
    that its values at l and u lie symmetric about 1. Then l becomes the value at l, and u 2 - l.
    """
    cushion = 0.02407327424182761
    low, high = 1e-3, 1.0
    for published in COEFFICIENTS["polar_express"].published[:7]:
        triple, _, _, condition = best_quintic(max(low, cushion * high), high)
        centre = (value(triple, low) + value(triple, high)) / 2
        triple = tuple(x / centre for x in triple)
        # Solving a system in float64 loses as many digits as its condition number has: 2 for the
        # first six, 6 for the seventh, whose interval is 0.002 wide.
        assert triple == pytest.approx(published, rel=condition * EPS)
        low = value(triple, low)
        high = 2 - low


def test_the_last_polynomial_of_polar_express_is_flat_at_one():
    """As l and u close in on 1 the best quintic turns into the one with p(1) = 1, p' = p'' = 0."""
    conditions = [[1, 1, 1], [1, 3, 5], [0, 6, 20]]
    flat = np.linalg.solve(conditions, [1, 0, 0])
    assert COEFFICIENTS["polar_express"].published[-1] == pytest.approx(tuple(flat), rel=64 * EPS)


def test_cans_is_the_greedy_composition_of_best_quintics():
    """Algorithm 1 of its paper for degree 5 from [1e-3, 1]; printed with four decimals."""
    low, high = 1e-3, 1.0
    for published in COEFFICIENTS["cans"].published:
        triple, error, _, _ = best_quintic(low, high)
        assert triple == pytest.approx(published, abs=0.5e-4)
        low, high = 1 - error, 1 + error


def test_the_typed_triples_are_the_published_ones():
    assert {name: COEFFICIENTS[name].published for name in PUBLISHED} == PUBLISHED
