# SPDX-License-Identifier: Apache-2.0
"""Second moments of the orthogonal factor, which even out how fast its rows or entries move.

A method is a frozen description, a row of `SECOND_MOMENTS`. It acts on the stacks of wide matrices
after `orthogonalize` and before the shape scale. What it keeps of a leaf has the shape of the leaf,
but 1 for the axes that are averaged.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmuon.balance import reduced
from fmuon.base import ConfigurationError, LeafError, Stack, View, check_number, lookup
from fmuon.momentum import debias, root


@dataclass(frozen=True)
class NorMuon:
    """The factor O divided, row by row, by its root mean square over time; its norm is kept.

    With v' = b v + (1 - b) mean(O^2) along the averaged axis and P = O / (sqrt(v') + eps), the
    factor becomes |O| P / (|P| + eps). [Li et al. 2025, arXiv 2510.05491, algorithm 1, with the
    norm kept as in the authors' code]

    Args:
        beta: decay b of the average.
        axis: "rows" keeps one v per row of the matrix view; "long" one per index of its longer
            side, which are the rows of a square one.
        eps: guards the two divisions.
        norm: how it guards that by |P|: "add" divides by |P| + eps, "clamp" by max(|P|, eps).
        root: how it guards that by sqrt(v'): "add" as above, "clamp" divides by sqrt(max(v', eps)).
    """

    beta: float = 0.95
    axis: str = "rows"
    eps: float = 1e-10
    norm: str = "add"
    root: str = "add"

    def __post_init__(self) -> None:
        _check(self)
        if self.axis not in ("rows", "long"):
            raise ConfigurationError(f"NorMuon: axis={self.axis!r}; known: 'rows', 'long'")
        for name in ("norm", "root"):
            if (value := getattr(self, name)) not in ("add", "clamp"):
                raise ConfigurationError(f"NorMuon: {name}={value!r}; known: 'add', 'clamp'")

    def shape(self, path: str, view: View) -> tuple[int, ...]:
        """The shape of what is kept of a leaf; raises `LeafError` where blocks are in the way."""
        wide = view.fan_out < view.fan_in
        over_rows = self.axis == "long" and wide
        crossed = view.row_blocks if over_rows else view.column_blocks
        sides = ((m, n) for m in view.row_blocks for n in view.column_blocks)
        if len(crossed) > 1 or (self.axis == "long" and any((m < n) != wide for m, n in sides)):
            raise LeafError(
                f"{path!r}: NorMuon(axis={self.axis!r}) can't average across the blocks "
                f"{view.row_blocks} x {view.column_blocks}; label the leaf without them"
            )
        averaged = view.row_axes if over_rows else view.column_axes
        return tuple(1 if axis in averaged else side for axis, side in enumerate(view.shape))

    def __call__(
        self,
        factor: Stack,
        moment: Stack,
        t: Tensor,  # noqa: ARG002
        tall: Sequence[bool],
    ) -> tuple[Stack, Stack]:
        """(O, v) -> (new O, v'), with v broadcast to the shape of O.

        `t`, [k, 1, 1] or 0-d, counts the updates of each matrix, this one included; `tall` says
        which are stored transposed.
        """
        short, long = factor.shape[-2:]
        over_short = [short < long] * len(tall) if self.axis == "long" else tall
        mean = reduced(_mean, factor * factor, over_short).expand_as(factor)
        moment = torch.lerp(moment, mean, 1 - self.beta)
        clamps = self.root == "clamp"
        even = factor / (root(moment.clamp(min=self.eps)) if clamps else root(moment) + self.eps)
        size = _norm(even)
        size = size + self.eps if self.norm == "add" else size.clamp(min=self.eps)
        return even * (_norm(factor) / size), moment


@dataclass(frozen=True)
class AdaMuon:
    """The factor O divided, entry by entry, by its root mean square over time.

    With v' = b v + (1 - b) O^2 and P = O / (sqrt(v' / (1 - b^t)) + eps), the factor becomes
    sqrt(min(m, n)) P / (|P| + eps). [Si et al. 2025, arXiv 2507.11005, algorithm 1, whose sign of
    what is orthogonalised is `equilibrate="sign"`]

    Args:
        beta: decay b of the average.
        eps: guards the two divisions.
        bias_correction: whether v' is divided by 1 - b^t; the norm makes up for it but for eps, and
            the authors' code does without.
    """

    beta: float = 0.999
    eps: float = 1e-8
    bias_correction: bool = True

    def __post_init__(self) -> None:
        _check(self)

    def shape(self, path: str, view: View) -> tuple[int, ...]:  # noqa: ARG002
        """The shape of what is kept of a leaf: its own."""
        return view.shape

    def __call__(
        self,
        factor: Stack,
        moment: Stack,
        t: Tensor,
        tall: Sequence[bool],  # noqa: ARG002
    ) -> tuple[Stack, Stack]:
        """(O, v) -> (new O, v'), as for `NorMuon`."""
        moment = torch.lerp(moment, factor * factor, 1 - self.beta)
        mean = moment
        if self.bias_correction:
            mean = moment / debias(torch.full_like(t, self.beta), t).to(factor.dtype)
        even = factor / (root(mean) + self.eps)
        return even * (math.sqrt(factor.shape[-2]) / (_norm(even) + self.eps)), moment


SecondMoment: TypeAlias = NorMuon | AdaMuon
SECOND_MOMENTS: dict[str, Callable[[], SecondMoment]] = {"normuon": NorMuon, "adamuon": AdaMuon}


def _check(method: SecondMoment) -> None:
    name = type(method).__name__
    check_number(f"{name}: beta", method.beta, below=1)
    check_number(f"{name}: eps", method.eps)


def _mean(x: Stack, axis: int) -> Tensor:
    return x.mean(axis, keepdim=True)


def _norm(x: Stack) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def second_moment_method(method: Any) -> SecondMoment | None:
    """The method of that name with its defaults; a method or None passes through."""
    if isinstance(method, str):
        return lookup(SECOND_MOMENTS, method, "second_moment")()
    if method is None or isinstance(method, SecondMoment):
        return method
    raise ConfigurationError(
        f"second_moment={method!r}; known: None, a fmuon.NorMuon or fmuon.AdaMuon, "
        f"{', '.join(map(repr, SECOND_MOMENTS))}"
    )
