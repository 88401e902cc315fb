# SPDX-License-Identifier: Apache-2.0
"""Laws that every orthogonaliser keeps, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fmuon.coefficients import COEFFICIENTS
from fmuon.methods import METHODS
from fmuon.orthogonalize import NewtonSchulz

SUBJECTS = {name: make() for name, make in METHODS.items()}
SUBJECTS |= {f"newton_schulz({name})": NewtonSchulz(name) for name in COEFFICIENTS}
# Fifteen products; the smallest singular values are amplified a thousandfold.
LAW = {"rtol": 1e-9, "atol": 1e-9}

methods = pytest.mark.parametrize("method", SUBJECTS.values(), ids=SUBJECTS)
sides = st.integers(1, 9)
seeds = st.integers(0, 2**31)


def gaussian(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(seed, n):
    return torch.linalg.qr(gaussian(seed, n, n)).Q


@methods
@given(rows=sides, columns=sides, seed=seeds)
def test_transposing_commutes(method, rows, columns, seed):
    x = gaussian(seed, rows, columns)
    assert_close(method(x.T), method(x).T, **LAW)


@methods
@given(rows=sides, columns=sides, seed=seeds, power=st.integers(-250, 250))
def test_a_positive_factor_changes_nothing(method, rows, columns, seed, power):
    x = gaussian(seed, rows, columns)
    assert_close(method(x * 10.0**power), method(x), **LAW)


@methods
@given(rows=sides, columns=sides, seed=seeds)
def test_rotations_commute(method, rows, columns, seed):
    x, u, v = gaussian(seed, rows, columns), rotation(seed + 1, rows), rotation(seed + 2, columns)
    assert_close(method(u @ x @ v.T), u @ method(x) @ v.T, **LAW)


@methods
@given(count=st.integers(1, 5), rows=sides, columns=sides, seed=seeds)
def test_a_stack_is_its_matrices_one_by_one(method, count, rows, columns, seed):
    x = gaussian(seed, count, rows, columns)
    assert_close(method(x), torch.stack([method(single) for single in x]), **LAW)


@methods
@given(rows=sides, columns=sides, pad=st.tuples(sides, sides), seed=seeds)
def test_zero_rows_and_columns_stay_zero(method, rows, columns, pad, seed):
    x = gaussian(seed, rows, columns)
    padded = torch.nn.functional.pad(x, (0, pad[1], 0, pad[0]))
    expected = torch.nn.functional.pad(method(x), (0, pad[1], 0, pad[0]))
    assert_close(method(padded), expected, **LAW)


@methods
@given(rows=sides, columns=sides, seed=seeds)
def test_singular_vectors_are_kept_and_values_lie_in_the_band(method, rows, columns, seed):
    x = gaussian(seed, rows, columns)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    response = torch.diag(u.T @ method(x) @ vh.T)
    assert_close(method(x), u @ torch.diag(response) @ vh, **LAW)
    assert (response < 1.21).all()
    assert (response[s > 1e-2 * s.norm()] > 0.65).all()
