# SPDX-License-Identifier: Apache-2.0
"""What does a step of FMuon take besides orthogonalising, next to a whole step of AdamW?

    python benchmarks/overhead.py                       print the table
    python benchmarks/overhead.py --record              and append it to results/overhead.jsonl
    python benchmarks/overhead.py --inventory gpt-128 --cpu

A step of FMuon, its orthogonalisation alone on the stacks of that step, a step of FMuon with a
method that returns what it is given, and one of torch.optim.AdamW(foreach=True) take turns in one
process; those of FMuon eager, and compiled. "rest" is the first less the second; "bare" is the
third, which says the same without a difference of large numbers. --cpu counts the seconds of the
process on all of its cores, which say more than the clock where others use the machine.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import harness
import tables
import torch
from agreement import give
from harness import Row, Timed
from inventories import INVENTORIES, TRIAL, Inventory
from peers import LR, MODE, Method, optimizer, shim
from torch import Tensor, nn

import fmuon

METHODS: dict[str, Method] = {
    "quintic": fmuon.NewtonSchulz(dtype="float32"),
    "auto": fmuon.Auto(),
}
FORMS: dict[str, str | bool] = {"FMuon": False, "FMuon compiled": MODE}


def main() -> None:
    """Measure the inventories that were asked for."""
    arguments = _arguments()
    if arguments.record:
        harness.refuse_dirty_tree()
    stamp = harness.environment()
    inventories = TRIAL if arguments.trial else INVENTORIES
    clock = cpu_seconds if arguments.cpu else harness.wall_seconds
    rows = [
        measure(name, inventory, arguments.rounds, arguments.seconds, clock)
        for name, inventory in inventories.items()
        if arguments.inventory in (None, name)
    ]
    print(tables.overhead(rows))
    if arguments.record:
        print(f"recorded in {harness.record('overhead', rows, stamp).name}")


def cpu_seconds(step: Callable[[], Any]) -> float:
    """Of one call, by the cores of this process."""
    before = time.process_time()
    step()
    return time.process_time() - before


def measure(
    name: str,
    inventory: Inventory,
    rounds: int,
    seconds: float,
    clock: Callable[[Callable[[], Any]], float] = harness.wall_seconds,
) -> Row:
    """The smallest times of an inventory; those of FMuon by method."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in inventory.shapes]
    gradients = [torch.randn_like(w) for w in weights]

    def stepping(build: Callable[[list[nn.Parameter]], Any]) -> Timed:
        params = [nn.Parameter(w.clone()) for w in weights]
        step = build(params).step
        give(params, gradients)
        # Of the first step everything is made for the first time.
        step()
        return Timed(step)

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=LR, foreach=True)

    subjects = {"adamw": stepping(optimizer(adamw))}
    for form, compile in FORMS.items():
        subjects[f"{form}, bare"] = stepping(shim(_same, compile=compile))
        for of, method in METHODS.items():
            subjects[f"{form}, {of} step"] = stepping(shim(method, compile=compile))
            alone = _alone(method, weights, gradients, compile)
            alone()
            subjects[f"{form}, {of} alone"] = Timed(alone)
    times = harness.interleave(subjects, rounds, seconds, clock)
    return {
        "inventory": name,
        "clock": "wall" if clock is harness.wall_seconds else "cpu",
        "rounds": min(map(len, times.values())),
        **{f"seconds_{subject}": min(found) for subject, found in times.items()},
    }


def _same(x: Tensor) -> Tensor:
    return x


def _alone(
    method: Any, weights: list[Tensor], gradients: list[Tensor], compile: str | bool
) -> Callable[[], Any]:
    """The calls of the method in one step of FMuon, on the stacks of that step."""
    calls: list[tuple[Method, Tensor]] = []

    class Watched:
        """Notes what is orthogonalised, and by which of the methods that there is to choose."""

        def __call__(self, x: Tensor) -> Tensor:
            calls.append((method, x.clone()))
            return x

        def choose(self, *shape: Any) -> Method:
            chosen: Method = method.choose(*shape) if hasattr(method, "choose") else method

            def noted(x: Tensor) -> Tensor:
                calls.append((chosen, x.clone()))
                return x

            return noted

    params = [nn.Parameter(w.clone()) for w in weights]
    running = shim(Watched(), compile=False)(params)
    give(params, gradients)
    running.step()
    assert sum(x.numel() for _, x in calls) == sum(w.numel() for w in weights)

    methods = [chosen for chosen, _ in calls]

    @torch.no_grad()
    def orthogonalize(stacks: list[Tensor]) -> list[Tensor]:
        return [chosen(x) for chosen, x in zip(methods, stacks, strict=True)]

    function = fmuon.compile(orthogonalize, compile) if isinstance(compile, str) else orthogonalize
    return functools.partial(function, [x for _, x in calls])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to results/overhead.jsonl")
    parser.add_argument("--inventory", choices=INVENTORIES, help="only this one")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20, help="at most, per subject")
    parser.add_argument("--cpu", action="store_true", help="seconds of the process, not the clock")
    parser.add_argument("--trial", action="store_true", help="small matrices")
    arguments = parser.parse_args()
    if arguments.record and (arguments.trial or arguments.cpu):
        parser.error("what is recorded is the clock, on the inventories")
    return arguments


if __name__ == "__main__":
    main()
