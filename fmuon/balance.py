# SPDX-License-Identifier: Apache-2.0
"""Rows and columns made equally large, before or after a matrix is orthogonalised.

Rows and columns are those of the matrix view. Functions map a stack of wide matrices to another;
`tall` says which of its matrices are stored transposed, so that their rows are its columns. Zero
rows and columns stay zero.

Before: "rows", "columns" and "rows_and_columns" are the forms R, C and RC of MuonEq times a number
that only the eps of an orthogonaliser sees [Chang et al. 2026, arXiv 2603.28254]. "sign" is of
AdaMuon [Si et al. 2025, arXiv 2507.11005, algorithm 1].

After: all but "frobenius" are of Muon+ [Zhang et al. 2026, arXiv 2602.21545].
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fmuon.base import Stack
from fmuon.orthogonalize import largest_entry, with_unit_entries

Balance: TypeAlias = Callable[[Stack, Sequence[bool]], Stack]


def reduced(reduce: Callable[[Stack, int], Tensor], x: Stack, over_short: Sequence[bool]) -> Tensor:
    """A reduction of x that keeps its axes: of each matrix over the short axis or the long one.

    Of the shape [k, 1, long] or [k, short, 1] where all matrices agree, else of that of x.
    """
    if all(over_short):
        return reduce(x, -2)
    if not any(over_short):
        return reduce(x, -1)
    chosen = torch.tensor(over_short, device=x.device).reshape(-1, 1, 1)
    return torch.where(chosen, reduce(x, -2), reduce(x, -1))


def _norm(x: Stack, axis: int | tuple[int, int]) -> Tensor:
    """Along an axis, or of every matrix; 1 where all is zero."""
    norm = torch.linalg.vector_norm(x, dim=axis, keepdim=True)
    return torch.where(norm > 0, norm, 1)


def _row_norms(x: Stack, tall: Sequence[bool]) -> Tensor:
    return reduced(_norm, x, tall)


def _column_norms(x: Stack, tall: Sequence[bool]) -> Tensor:
    return reduced(_norm, x, [not flag for flag in tall])


def _unit_rows(x: Stack, tall: Sequence[bool]) -> Stack:
    return x / _row_norms(x, tall)


def _unit_columns(x: Stack, tall: Sequence[bool]) -> Stack:
    return x / _column_norms(x, tall)


def _unit_rows_and_columns(x: Stack, tall: Sequence[bool]) -> Stack:
    """D_r^(-1/2) X D_c^(-1/2), with the squared norms of the rows and of the columns of X."""
    return x / _row_norms(x, tall) / _column_norms(x, tall)


def _before(balance: Balance) -> Balance:
    """Of entries of any size, and with the Frobenius norm that it had."""

    def balanced(x: Stack, tall: Sequence[bool]) -> Stack:
        unit = with_unit_entries(x)
        even = balance(unit, tall)
        return even * (_norm(unit, (-2, -1)) / _norm(even, (-2, -1))) * largest_entry(x)

    return balanced


EQUILIBRATIONS: dict[str, Balance] = {
    "rows": _before(_unit_rows),
    "columns": _before(_unit_columns),
    "rows_and_columns": _before(_unit_rows_and_columns),
    "sign": lambda x, tall: x.sign(),  # noqa: ARG005
}
"""What is done to a matrix before it is orthogonalised."""


def _unit_frobenius(x: Stack, tall: Sequence[bool]) -> Stack:  # noqa: ARG001
    """With the Frobenius norm of a matrix whose singular values are all 1."""
    return x * (math.sqrt(x.shape[-2]) / _norm(x, (-2, -1)))


RENORMALIZATIONS: dict[str, Balance] = {
    "rows": _unit_rows,
    "columns": _unit_columns,
    "rows_columns": lambda x, tall: _unit_columns(_unit_rows(x, tall), tall),
    "columns_rows": lambda x, tall: _unit_rows(_unit_columns(x, tall), tall),
    # As in nanochat.
    "frobenius": _unit_frobenius,
}
"""What is done to its orthogonal factor."""
