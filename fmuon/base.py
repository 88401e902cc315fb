# SPDX-License-Identifier: Apache-2.0
"""Contracts and vocabulary: what every other module may rely on.

Shapes in the aliases below are those of the array axes, in order. `fan_out` is the number of rows
of the matrix view of a parameter and `fan_in` the number of its columns: the order of
`torch.nn.Linear.weight`.
"""

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

_Row = TypeVar("_Row")
_Function = TypeVar("_Function", bound=Callable[..., Any])

Stack: TypeAlias = Annotated[Tensor, "matrices short long"]
"""Wide matrices of one shape, `short <= long`."""
Scalar: TypeAlias = float | Tensor | Callable[[Tensor], Any]
"""A number, a 0-d tensor, or a callable of the step that returns either."""
Tree: TypeAlias = Any
"""Any pytree of tensors; a leaf may be None."""
State: TypeAlias = dict[str, Any]
"""Nested dicts of tensors keyed by leaf path (see `fmuon.init`)."""


class FMuonError(ValueError):
    """Base of every error that fmuon raises on purpose."""


class ConfigurationError(FMuonError):
    """An option has a value that is not allowed."""


class LeafError(FMuonError):
    """A parameter, gradient or label can't be used as given; the message names the leaf."""


class StateError(FMuonError):
    """The state doesn't belong to these leaves or to this configuration."""


class Transformation(NamedTuple):
    """A pair of pure functions, the contract of optax.

    Both fields are bound methods of one frozen configuration, `transformation.update.__self__`.
    """

    init: Callable[..., State]
    update: Callable[..., tuple[Tree, State]]


@dataclass(frozen=True)
class Matrix:
    """How the axes of a leaf make one matrix, or a stack of matrices.

    `fan_out` names the row axes and `fan_in` the column axes (an int or a tuple, negatives count
    from the end); every axis in neither is a stack axis. `blocks` splits the rows, and `blocks_in`
    the columns, into matrices that are orthogonalised and scaled each on its own. `scale` is the
    multiplier of the leaf's matrices where it shall not be that of the scale rule.

    >>> Matrix()                                  # nn.Linear.weight (out, in)
    >>> Matrix(1, 0)                              # a kernel stored (in, out)
    >>> Matrix(0, (1, 2, 3))                      # a convolution (out, in, height, width)
    >>> Matrix(1, 2)                              # experts (E, out, in)
    >>> Matrix(blocks=(d, d, d))                  # fused query, key and value rows
    """

    fan_out: int | tuple[int, ...] = 0
    fan_in: int | tuple[int, ...] = 1
    blocks: tuple[int, ...] | None = None
    blocks_in: tuple[int, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        # Lists are accepted and stored as tuples: the view must be hashable.
        for name in ("fan_out", "fan_in", "blocks", "blocks_in"):
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            blocks = name.startswith("blocks")
            allowed = value is None if blocks else isinstance(value, int)
            if not allowed and not (
                isinstance(value, tuple) and all(isinstance(v, int) for v in value)
            ):
                wanted = "a tuple of sizes, or None" if blocks else "an axis, or a tuple of axes"
                raise ConfigurationError(f"Matrix: {name}={value!r}; give {wanted}")
        if self.scale is not None and not (is_number(self.scale) and 0 <= self.scale < math.inf):
            raise ConfigurationError(
                f"Matrix: scale={self.scale!r}; give a number that is not negative, or None"
            )

    def view(self, path: str, shape: tuple[int, ...]) -> "View":
        """Bind to a shape; raises `LeafError` naming `path` where the two don't fit."""
        rows, columns = (self._axes(path, shape, name) for name in ("fan_out", "fan_in"))
        if overlap := set(rows) & set(columns):
            raise LeafError(
                f"{path!r}: axis {min(overlap)} is named in both fan_out={self.fan_out} and "
                f"fan_in={self.fan_in}; an axis is a row axis, a column axis or a stack axis"
            )
        stack = tuple(axis for axis in range(len(shape)) if axis not in {*rows, *columns})
        fan_out = math.prod(shape[axis] for axis in rows)
        fan_in = math.prod(shape[axis] for axis in columns)
        return View(
            shape=shape,
            order=stack + rows + columns,
            row_axes=rows,
            column_axes=columns,
            count=math.prod(shape[axis] for axis in stack),
            fan_out=fan_out,
            fan_in=fan_in,
            row_blocks=self._split(path, "blocks", self.blocks, "fan_out", fan_out),
            column_blocks=self._split(path, "blocks_in", self.blocks_in, "fan_in", fan_in),
            scale=self.scale,
        )

    def _axes(self, path: str, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
        value: int | tuple[int, ...] = getattr(self, name)
        axes = (value,) if isinstance(value, int) else value
        rank = len(shape)
        if not axes or any(not -rank <= axis < rank for axis in axes):
            axes = f"name axes between {-rank} and {rank - 1}" if rank else "it has no axes"
            raise LeafError(
                f"{path!r}: {name}={value} doesn't fit a leaf of shape {shape}; {axes}, or label "
                f"the leaf 'auxiliary'"
            )
        normalised = tuple(axis % rank for axis in axes)
        if len(set(normalised)) < len(normalised):
            raise LeafError(f"{path!r}: {name}={value} names an axis of shape {shape} twice")
        return normalised

    @staticmethod
    def _split(
        path: str, name: str, blocks: tuple[int, ...] | None, fan: str, size: int
    ) -> tuple[int, ...]:
        if blocks is None:
            return (size,)
        if any(block < 1 for block in blocks) or sum(blocks) != size:
            raise LeafError(
                f"{path!r}: {name}={blocks} sum to {sum(blocks)}, {fan} is {size}; give positive "
                f"sizes that sum to {size}"
            )
        return blocks


@dataclass(frozen=True)
class View:
    """A `Matrix` bound to the shape of a leaf: `count` matrices of `fan_out` x `fan_in`.

    `order` permutes the leaf's axes to (stack axes, row axes, column axes); the blocks sum to the
    fans; `scale` is the leaf's own multiplier.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    row_axes: tuple[int, ...]
    column_axes: tuple[int, ...]
    count: int
    fan_out: int
    fan_in: int
    row_blocks: tuple[int, ...]
    column_blocks: tuple[int, ...]
    scale: float | None = None

    def multiplier(self, rule: Callable[[int, int], float], rows: int, columns: int) -> float:
        """What the orthogonal factor of a block is multiplied by: the rule's, or the leaf's own."""
        return rule(rows, columns) if self.scale is None else self.scale


def constant_in_graphs(function: _Function) -> _Function:
    """Decorate planning code: torch.compile calls it while tracing and keeps the result.

    Its arguments must be constants. What torch.compiler.assume_constant_result does, without the
    import of torch._dynamo, which would make `import fmuon` heavy.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@constant_in_graphs
def is_transformed() -> bool:
    """Whether a transform of torch.func is at work: inside, `requires_grad` can't be set."""
    stack = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
    return stack is not None


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether a value is a real number that a double holds; 0-d tensors too, if not `whole`."""
    if isinstance(value, Tensor):
        return not (whole or value.ndim or value.is_complex())
    kind = numbers.Integral if whole else numbers.Real
    if not isinstance(value, kind) or isinstance(value, bool):  # pyright: ignore
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def check_number(what: str, value: Any, *, below: float = math.inf) -> None:
    """Refuse all but a number from 0 on and below a bound."""
    if not (is_number(value) and 0 <= value < below):
        bound = "finite" if below == math.inf else f"below {below:g}"
        raise ConfigurationError(
            f"{what}={value!r}: give a number that is not negative and {bound}"
        )


def check_flag(what: str, value: Any) -> None:
    """Refuse all but True and False: the string "false" is true."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what}={value!r}: give True or False")


def check_floating(what: str, value: Any) -> None:
    """Refuse all but a floating point `torch.dtype`."""
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ConfigurationError(f"{what}={value!r}; a floating point torch.dtype is needed")


def near_misses(name: str, known: Iterable[str]) -> str:
    """The clause `; did you mean ...?` of an error message, or nothing."""
    close = difflib.get_close_matches(name, [str(k) for k in known], n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def lookup(table: Mapping[str, _Row], name: Any, what: str) -> _Row:
    """The row of a table, or a `ConfigurationError` that lists the known names."""
    if not isinstance(name, str) or name not in table:
        raise ConfigurationError(
            f"unknown {what} {name!r}; known: {', '.join(map(repr, table))}"
            f"{near_misses(str(name), table)}"
        )
    return table[name]
