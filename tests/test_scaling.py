# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from strategies import refusal

from fmuon import ConfigurationError, Matrix
from fmuon.scaling import SCALES, match_rms_adamw, original, scale_rule, spectral

sides = st.integers(1, 40)
# A QR factorisation leaves |Q^T Q - 1| of a few eps sqrt(side) per entry; the sides are below 41.
FLOAT64_ROUNDING = 64 * torch.finfo(torch.float64).eps


def semi_orthogonal(fan_out, fan_in):
    tall = torch.randn(max(fan_out, fan_in), min(fan_out, fan_in), dtype=torch.float64)
    q, _ = torch.linalg.qr(tall)
    return q if fan_out >= fan_in else q.mT


def rms(x):
    return x.square().mean().sqrt()


# Worked by hand from the formulas; the last column is sqrt(fan_out / fan_in).
@pytest.mark.parametrize(
    ("fan_out", "fan_in", "values"),
    [
        (8, 2, (2.0, 0.5657, 2.0)),
        (2, 8, (1.0, 0.5657, 0.5)),
        (64, 288, (1.0, 3.3941, 0.4714)),
        (4096, 1024, (2.0, 12.8, 2.0)),
        (1, 1, (1.0, 0.2, 1.0)),
    ],
)
def test_scales_of_known_shapes(fan_out, fan_in, values):
    rules = ("original", "match_rms_adamw", "spectral", "none")
    for rule, value in zip(rules, (*values, 1.0), strict=True):
        assert SCALES[rule](fan_out, fan_in) == pytest.approx(value, abs=5e-5), rule


@pytest.mark.parametrize(("matrix", "scale"), [(Matrix(), 1.0), (Matrix(1, 0), 2.0)])
def test_the_original_scale_follows_the_declared_layout(matrix, scale):
    view = matrix.view("w", (768, 3072))
    assert original(view.fan_out, view.fan_in) == scale


def test_a_convolution_is_scaled_as_the_matrix_of_its_view():
    view = Matrix(0, (1, 2, 3)).view("conv", (64, 32, 3, 3))
    assert match_rms_adamw(view.fan_out, view.fan_in) == pytest.approx(0.2 * math.sqrt(288))
    assert original(view.fan_out, view.fan_in) == 1.0


@given(sides, sides)
def test_match_rms_adamw_gives_every_shape_an_update_rms_of_a_fifth(fan_out, fan_in):
    update = SCALES["match_rms_adamw"](fan_out, fan_in) * semi_orthogonal(fan_out, fan_in)
    assert rms(update).item() == pytest.approx(0.2, rel=FLOAT64_ROUNDING)


@given(sides, sides)
def test_spectral_lets_an_update_change_the_rms_of_an_output_by_at_most_one(fan_out, fan_in):
    orthogonal = semi_orthogonal(fan_out, fan_in)
    # The first right singular vector is the input that is changed the most.
    x = torch.linalg.svd(orthogonal).Vh[0]
    change = spectral(fan_out, fan_in) * orthogonal @ (x / rms(x))
    assert rms(change).item() == pytest.approx(1.0, rel=FLOAT64_ROUNDING)


@given(sides, sides)
def test_original_is_spectral_but_never_below_one(fan_out, fan_in):
    assert original(fan_out, fan_in) == max(1.0, spectral(fan_out, fan_in))


@pytest.mark.parametrize("name", SCALES)
def test_a_rule_is_found_by_its_name(name):
    assert scale_rule(name) is SCALES[name]


def test_a_callable_is_taken_as_it_is():
    def halved(fan_out, fan_in):
        return 0.5

    assert scale_rule(halved) is halved


def test_an_unknown_rule_is_answered_with_the_names():
    assert_expected_inline(
        refusal(ConfigurationError, scale_rule, "match_rms_adam"),
        """\
unknown scale 'match_rms_adam'; known: 'original', 'match_rms_adamw',
'spectral', 'none'; did you mean 'match_rms_adamw'?""",
    )
