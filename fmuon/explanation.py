# SPDX-License-Identifier: Apache-2.0
"""What every leaf gets and why, as a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fmuon.base import Matrix, Transformation, Tree
from fmuon.distributed import Shares, shares_of
from fmuon.functional import configuration_of, muon
from fmuon.methods import chosen
from fmuon.partition import Assignment, route
from fmuon.planning import Configuration
from fmuon.tree import flatten


@dataclass(frozen=True)
class Row:
    """One leaf: `gets` is "muon", the rule's name or "frozen"; the rest is empty but for matrices.

    `matrices` is the view, "stack x fan_out x fan_in" or one such entry per block; `scale` the
    shape multiplier of the first. `owner` is the rank that orthogonalises a leaf that several
    share.
    """

    path: str
    shape: tuple[int, ...]
    gets: str
    matrices: str
    scale: str
    why: str
    owner: str = ""


@dataclass(frozen=True)
class Explanation:
    """Rows of `explain`; printing it gives a table and a summary.

    `shares` are what the ranks do where several share the work.
    """

    rows: tuple[Row, ...]
    summary: str
    shares: Shares | None = None

    def __str__(self) -> str:
        """The table, one line per leaf, the summary, and a table of ranks if there are several."""
        head = ("leaf", "shape", "gets", "matrices", "scale", "owner", "why")
        cells = [
            (r.path, "x".join(map(str, r.shape)), r.gets, r.matrices, r.scale, r.owner, r.why)
            for r in self.rows
        ]
        if self.shares is None:
            head, *cells = [(*line[:5], *line[6:]) for line in (head, *cells)]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        lines = [head, tuple("-" * width for width in widths), *cells]
        table = [_line(line, widths) for line in lines]
        ranks = [] if self.shares is None else ["", str(self.shares)]
        return "\n".join([*table, "", self.summary, *ranks])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def explain(
    params: nn.Module | Tree,
    opt: Transformation | Any = None,
    *,
    mesh: Any = None,
) -> Explanation:
    """One row per leaf: what it gets from `opt` (an `FMuon` too; by default `muon()`) and why.

    For a module without labels in `opt`, the routing is that of `label(module)`. Where leaves are
    shared among ranks there are owners, and a table of what each rank does; `mesh` is where plain
    leaves are to be thought of as sharded, as for `fmuon.distributed.plan`. Prints nothing:
    `print(fmuon.explain(model))`.
    """
    opt = muon() if opt is None else opt
    config = configuration_of(opt)
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
    shares = shares_of(config, leaves, assignments, mesh)
    owners = {path: f"rank {share.rank}" for share in shares.ranks for path in share.leaves}
    rows = tuple(
        replace(_row(config, path, leaf, assignments[path]), owner=owners.get(path, ""))
        for path, leaf in leaves.items()
    )
    return Explanation(rows, _summary(config, leaves, assignments), shares if owners else None)


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
    # What a method may choose by.
    kinds: dict[tuple[int, int], tuple[torch.dtype, torch.device]] = {}
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
                    shape = min(rows, columns), max(rows, columns)
                    stacks[shape] += view.count
                    kinds[shape] = leaf.dtype, leaf.device
    method = config.orthogonalize
    entries = [f"{count} of {m} x {n}" for (m, n), count in sorted(stacks.items())]
    choices = [chosen(method, count, *s, *kinds[s]) for s, count in sorted(stacks.items())]
    if any(choice is not method for choice in choices):
        entries = [f"{entry} by {choice}" for entry, choice in zip(entries, choices, strict=True)]
    counts = ", ".join(f"{elements[kind]:,} {kind}" for kind in sorted(elements, reverse=True))
    return f"elements: {counts}\nstacks: {', '.join(entries) or 'none'}, by {method}"
