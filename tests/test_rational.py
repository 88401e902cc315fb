# SPDX-License-Identifier: Apache-2.0
"""The rational functions beside laws of best approximation and of elliptic functions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmuon.rational import _tangents, best_rational, zolotarev

LOWERS = st.floats(-4, -1).map(lambda power: 10**power)


def turns(f, alternations):
    """Values of f - 1 over the error at the extrema between `lower` and 1, on a fine grid."""
    count = 20_000
    values = [f(f.lower ** (1 - i / count)) - 1 for i in range(count + 1)]
    inner = [
        b for a, b, c in zip(values, values[1:], values[2:], strict=False) if (b - a) * (c - b) < 0
    ]
    found = [values[0], *inner, values[-1]]
    assert len(found) == alternations
    return [value / f.error for value in found]


@settings(max_examples=15)
@given(st.integers(1, 5), LOWERS)
def test_the_error_alternates_as_often_as_a_best_approximation_must(poles, lower):
    # As many alternations as there are free numbers, and one: no function of the family is better.
    for f, free in ((zolotarev(poles, lower), 2 * poles + 1), (best_rational(poles, lower), 0)):
        values = turns(f, (free or 2 * poles + 2) + 1)
        assert [round(v, 3) for v in values] == [(-1.0) ** (i + 1) for i in range(len(values))]


@settings(max_examples=15)
@given(st.integers(1, 5), LOWERS)
def test_more_poles_and_the_cubic_term_are_better(poles, lower):
    assert best_rational(poles, lower).error < zolotarev(poles, lower).error
    assert best_rational(poles + 1, lower).error < best_rational(poles, lower).error


@settings(max_examples=15)
@given(st.integers(1, 5), LOWERS)
def test_beyond_the_ends_nothing_grows(poles, lower):
    f = best_rational(poles, lower)
    # From zero the function only rises to `lower`, and it is odd.
    values = [f(lower * i / 50) for i in range(51)]
    assert values == sorted(values)
    assert f(-0.3) == -f(0.3)
    assert all(c > 0 for c in (*f.residues, *f.shifts))


@pytest.mark.parametrize(
    ("lower", "poles", "error", "slope"),
    [(2e-3, 2, 0.155, 507), (2e-3, 3, 0.043, 723), (2e-3, 4, 0.012, 930), (1e-3, 3, 0.062, 1322),
     (5e-3, 2, 0.100, 233)],
)  # fmt: skip
def test_the_closed_form_has_the_errors_and_slopes_of_a_table_made_elsewhere(
    lower, poles, error, slope
):
    f = zolotarev(poles, lower)
    assert f.error == pytest.approx(error, abs=6e-4)
    assert f(1e-9) / 1e-9 == pytest.approx(slope, abs=1)


@pytest.mark.parametrize(
    ("poles", "lower", "error", "slope", "linear", "cubic", "shift"),
    [
        (1, 1e-2, 0.227, 87, 2.48857895, -1.7781285, 7.41716e-4),
        (2, 2e-3, 0.109, 568, 1.9057967, -1.12887633, 1.35881465e-5),
        (2, 1e-3, 0.150, 1027, 2.12445912, -1.36520987, 4.575708e-6),
        (3, 2e-3, 0.028, 789, 1.3031226, -0.543926235, 5.44639167e-6),
        (3, 1e-3, 0.043, 1440, 1.45043762, -0.675356263, 1.73677874e-6),
    ],
)
def test_with_the_cubic_term_a_linear_program_finds_the_same(
    poles, lower, error, slope, linear, cubic, shift
):
    f = best_rational(poles, lower)
    assert f.error == pytest.approx(error, abs=6e-4)
    assert f(1e-9) / 1e-9 == pytest.approx(slope, abs=1)
    assert (f.linear, f.cubic, f.shifts[0]) == pytest.approx((linear, cubic, shift), rel=1e-3)


@given(st.floats(1e-6, 0.9), st.floats(0.01, 0.99))
def test_the_elliptic_functions_are_those_of_the_addition_theorem(complement, place):
    # sn / cn of u and of K - u multiply to 1 / k'.
    here, there, half = _tangents(complement, [place, 1 - place, 0.5])
    assert here * there * complement == pytest.approx(1, rel=1e-8)
    assert half**2 * complement == pytest.approx(1, rel=1e-8)
