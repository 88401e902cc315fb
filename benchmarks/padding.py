# SPDX-License-Identifier: Apache-2.0
"""What would be gained by padding stacks of one short side to a common long side?

    python benchmarks/padding.py

Columns of zeros change nothing in the polar factor, so that matrices of 64 x 64 and of 64 x 128
could share a stack of 64 x 128: fewer calls for more flops. For every inventory the stacks are
merged as the cost model of `fmuon.Auto` finds best for the method, and both forms take turns. The
padding itself is not timed: what is printed is the most that there is to gain.
"""

import argparse
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import harness
import torch
from harness import Timed
from inventories import INVENTORIES, Inventory
from tables import table

import fmuon
from fmuon.methods import chosen, cost

Stacks: TypeAlias = dict[tuple[int, int], int]
"""(short side, long side) -> number of matrices."""

METHODS: dict[str, Any] = {
    "quintic": fmuon.NewtonSchulz(dtype="float32"),
    "quintic, Gram": fmuon.GramNewtonSchulz(dtype="float32"),
    "auto": fmuon.Auto(),
}


def main() -> None:
    """Print one line per inventory and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="at most, per form")
    arguments = parser.parse_args()
    header = (
        "inventory", "method", "stacks", "merged", "expected gain", "apart, ms", "merged, ms",
        "measured gain",
    )  # fmt: skip
    lines = [
        line
        for name, inventory in INVENTORIES.items()
        for line in compared(name, inventory, arguments.seconds)
    ]
    print(table(header, lines))


def compared(name: str, inventory: Inventory, seconds: float) -> list[Sequence[Any]]:
    """The stacks of an inventory apart and merged, by method."""
    apart: Stacks = Counter((min(shape), max(shape)) for shape in inventory.shapes)
    lines: list[Sequence[Any]] = []
    for label, method in METHODS.items():
        together = merged(method, apart)
        expected = total(method, apart) / total(method, together)
        line = [name, label, len(apart), len(together), f"{expected:.2f}"]
        if together == apart:
            lines.append([*line, "", "", ""])
            continue
        subjects = {"apart": Timed(calls(method, apart)), "merged": Timed(calls(method, together))}
        for subject in subjects.values():
            subject.step()
        times = {k: min(v) for k, v in harness.interleave(subjects, 200, seconds).items()}
        line += [f"{times[form] * 1e3:.2f}" for form in subjects]
        lines.append([*line, f"{times['apart'] / times['merged']:.2f}"])
    return lines


def merged(method: Any, apart: Stacks) -> Stacks:
    """The cheapest stacks of every short side: neighbours in the long side share the longest."""
    sides: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (short, long), count in sorted(apart.items()):
        sides[short].append((long, count))
    best: Stacks = {}
    for short, stacks in sides.items():
        # cheapest[j]: the cost of the first j stacks, and how they are merged.
        cheapest: list[tuple[float, Stacks]] = [(0.0, {})]
        for j in range(1, len(stacks) + 1):
            candidates: list[tuple[float, Stacks]] = []
            for i in range(j):
                last = {(short, stacks[j - 1][0]): sum(count for _, count in stacks[i:j])}
                before, merges = cheapest[i]
                candidates.append((before + total(method, last), merges | last))
            cheapest.append(min(candidates, key=lambda candidate: candidate[0]))
        best |= cheapest[-1][1]
    return best


def total(method: Any, stacks: Stacks) -> float:
    """What stacks cost by the model of `fmuon.methods`."""
    return sum(
        count * cost(_for(method, count, short, long), count, short, long)
        for (short, long), count in stacks.items()
    )


def calls(method: Any, stacks: Stacks) -> Callable[[], Any]:
    """All stacks through the method, one after the other."""
    made = [
        functools.partial(_for(method, count, short, long), torch.randn(count, short, long))
        for (short, long), count in stacks.items()
    ]
    return lambda: [call() for call in made]


def _for(method: Any, count: int, short: int, long: int) -> Any:
    return chosen(method, count, short, long, torch.float32, torch.device("cpu"))


if __name__ == "__main__":
    main()
