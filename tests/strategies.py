# SPDX-License-Identifier: Apache-2.0
"""Shared by several tests: a hypothesis strategy, and `refusal` for the texts of errors."""

import math
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from fmuon import Matrix


def refusal(error: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the error that a call raises, folded to the width of a page."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    return folded(str(caught.value))


def folded(text: str) -> str:
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)


@st.composite
def block_sizes(draw: st.DrawFn, total: int) -> tuple[int, ...] | None:
    """Positive sizes that sum to a total, or None for no blocks."""
    if draw(st.booleans()):
        return None
    cuts = [end for end in range(1, total) if draw(st.booleans())]
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True))


@st.composite
def matrix_views(draw: st.DrawFn) -> tuple[Matrix, tuple[int, ...]]:
    """A view and a shape it fits: any axes as rows and columns, stack axes, blocks either way."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    rank = len(shape)
    axes = draw(st.permutations(range(rank)))
    rows = draw(st.integers(1, rank - 1))
    columns = draw(st.integers(1, rank - rows))
    fan_out, fan_in = axes[:rows], axes[rows : rows + columns]
    blocks = draw(block_sizes(math.prod(shape[axis] for axis in fan_out)))
    blocks_in = draw(block_sizes(math.prod(shape[axis] for axis in fan_in)))
    from_the_end = draw(st.booleans())
    signed = [tuple(a - rank if from_the_end else a for a in axes) for axes in (fan_out, fan_in)]
    return Matrix(*signed, blocks=blocks, blocks_in=blocks_in), shape
