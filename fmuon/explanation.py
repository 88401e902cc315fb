# SPDX-License-Identifier: Apache-2.0
"""What every leaf gets and why, as a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fmuon.base import Matrix, Transformation, Tree
from fmuon.functional import configuration_of, muon
from fmuon.partition import Assignment, route
from fmuon.planning import Configuration
from fmuon.tree import flatten


@dataclass(frozen=True)
class Row:
    """One leaf: `gets` is "muon", the rule's name or "frozen"; the rest is empty but for matrices.

    `matrices` is the view, "stack x fan_out x fan_in" or one such entry per block; `scale` the
    shape multiplier of the first.
    """

    path: str
    shape: tuple[int, ...]
    gets: str
    matrices: str
    scale: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """Rows of `explain`; printing it gives a table and a summary."""

    rows: tuple[Row, ...]
    summary: str

    def __str__(self) -> str:
        """The table, one line per leaf, and the summary."""
        head = ("leaf", "shape", "gets", "matrices", "scale", "why")
        cells = [
            (row.path, "x".join(map(str, row.shape)), row.gets, row.matrices, row.scale, row.why)
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        lines = [head, tuple("-" * width for width in widths), *cells]
        table = [_line(line, widths) for line in lines]
        return "\n".join([*table, "", self.summary])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def explain(params: nn.Module | Tree, opt: Transformation | Any = None) -> Explanation:
    """One row per leaf: what it gets from `opt` (an `FMuon` too; by default `muon()`) and why.

    For a module without labels in `opt`, the routing is that of `label(module)`. Prints nothing:
    `print(fmuon.explain(model))`.
    """
    config = configuration_of(muon() if opt is None else opt)
    leaves: Mapping[str, Tensor | None]
    if isinstance(params, nn.Module):
        leaves = dict(params.named_parameters())
        routed = route(params)
        assignments = config.assign(leaves, routed)
        assignments |= {p: r for p, r in routed.items() if _repeats(assignments[p], r)}
    else:
        leaves, _ = flatten(params)
        assignments = config.assign(leaves)
    if hasattr(type(opt), "transformation"):
        # What the optimizer doesn't have, it doesn't train.
        absent = {p: a for p, a in assignments.items() if a.reason == "labels['re:.*']"}
        assignments |= {
            path: Assignment("frozen", "in no group of the optimizer")
            for path, assignment in absent.items()
            if assignment.label == "frozen"
        }
    rows = tuple(_row(config, path, leaves[path], assignments[path]) for path in leaves)
    return Explanation(rows, _summary(config, leaves, assignments))


def _repeats(assignment: Assignment, routed: Assignment) -> bool:
    """Whether a label of a single leaf, as label() gives them, says what the routing says."""
    return assignment.label == routed.label and "re:" not in assignment.reason


def _row(config: Configuration, path: str, leaf: Tensor | None, assignment: Assignment) -> Row:
    shape = () if leaf is None else tuple(leaf.shape)
    label = assignment.label
    if not isinstance(label, Matrix):
        name = config.rule_name(label)
        rule = str(config.rules[name]) if name is None else f"{name}: {config.rules[name]}"
        gets = "frozen" if label == "frozen" else rule
        return Row(path, shape, gets, "", "", assignment.reason)
    view = label.view(path, shape)
    sides = [(rows, columns) for rows in view.row_blocks for columns in view.column_blocks]
    count = f"{view.count} x " if view.count > 1 else ""
    matrices = ", ".join(
        f"{count}{rows} x {columns}" + (f" ({times} blocks)" if times > 1 else "")
        for (rows, columns), times in Counter(sides).items()
    )
    scale = "" if 0 in shape else f"{view.multiplier(config.scale, *sides[0]):.4g}"
    return Row(path, shape, "muon", matrices, scale, assignment.reason)


def _summary(
    config: Configuration, leaves: Mapping[str, Tensor | None], assignments: Mapping[str, Any]
) -> str:
    stacks: Counter[tuple[int, int]] = Counter()
    elements: Counter[str] = Counter()
    for path, (label, _, _) in assignments.items():
        leaf = leaves[path]
        if leaf is None:
            continue
        kind = "muon" if isinstance(label, Matrix) else label if label == "frozen" else "auxiliary"
        elements[kind] += leaf.numel()
        if isinstance(label, Matrix):
            view = label.view(path, tuple(leaf.shape))
            for rows in view.row_blocks:
                for columns in view.column_blocks:
                    stacks[min(rows, columns), max(rows, columns)] += view.count
    shapes = ", ".join(f"{count} of {m} x {n}" for (m, n), count in sorted(stacks.items()))
    counts = ", ".join(f"{elements[kind]:,} {kind}" for kind in sorted(elements, reverse=True))
    return f"elements: {counts}\nstacks: {shapes or 'none'}, by {config.orthogonalize}"
