# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.testing import assert_close

from fmuon.momentum import average, debias, look_ahead


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("b", [0.0, 0.5, 0.9, 0.999, 0.9999])
@pytest.mark.parametrize("t", [1, 2, 1000])
def test_debias_is_exact_to_the_last_bits(b, t):
    from fractions import Fraction

    exact = float(1 - Fraction(b) ** t)
    assert debias(scalar(b), scalar(t)).item() == pytest.approx(exact, rel=1e-12)


def test_average_is_the_ema():
    m, g = torch.randn(3, 4), torch.randn(3, 4)
    assert_close(average(m, g, scalar(0.9)), 0.9 * m + 0.1 * g)


def test_a_constant_gradient_is_its_own_look_ahead_with_bias_correction():
    g = torch.randn(3, 4, dtype=torch.float64)
    b, m = scalar(0.95), torch.zeros_like(g)
    for t in range(1, 6):
        m = average(m, g, b)
        plain = look_ahead(m, g, b, scalar(t), nesterov=False, bias_correction=True)
        assert_close(plain, g)
        ahead = look_ahead(m, g, b, scalar(t), nesterov=True, bias_correction=True)
        # b (1 - b^t) / (1 - b^(t+1)) + (1 - b) / (1 - b^t)
        factor = 0.95 * (1 - 0.95**t) / (1 - 0.95 ** (t + 1)) + 0.05 / (1 - 0.95**t)
        assert_close(ahead, factor * g)


def test_without_bias_correction_the_look_ahead_mixes_average_and_gradient():
    m, g, b, t = torch.randn(5), torch.randn(5), scalar(0.8), scalar(1)
    ahead = look_ahead(m, g, b, t, nesterov=True, bias_correction=False)
    assert_close(ahead, 0.8 * m + 0.2 * g)
    plain = look_ahead(m, g, b, t, nesterov=False, bias_correction=False)
    assert_close(plain, m)


def test_every_member_of_a_stack_has_its_own_decay_and_count():
    b, t = scalar([[0.9], [0.5]]), scalar([[1], [2]])
    m = torch.tensor([[0.1] * 3, [0.75] * 3], dtype=torch.float64)
    look = look_ahead(m, m, b, t, nesterov=False, bias_correction=True)
    assert_close(look, torch.ones(2, 3, dtype=torch.float64))
