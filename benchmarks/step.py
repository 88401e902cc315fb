# SPDX-License-Identifier: Apache-2.0
"""How long does one step take, next to other optimizers and to what the machine allows?

    python benchmarks/step.py                           print the tables
    python benchmarks/step.py --record                  and append them to results/step.jsonl
    python benchmarks/step.py --inventory gpt-128 --rounds 5
    python benchmarks/step.py --only "FMuon|torch"      subjects whose name matches
    python benchmarks/step.py --trial                   small matrices, to see that all works

All optimizers take turns in one process, each on its own copy of the same weights and gradients.
"""

import argparse
import re
import sys
import time
import warnings
from collections.abc import Sequence

import floors
import harness
import tables
import torch
from agreement import Reference, check, give, reference
from harness import Row, Timed
from inventories import INVENTORIES, TRIAL, Inventory
from peers import Subject, subjects

from fmuon.orthogonalize import multiplies_bfloat16

PRODUCTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    """Measure the inventories that were asked for."""
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.record:
        harness.refuse_dirty_tree()
    stamp = harness.environment()
    inventories = TRIAL if arguments.trial else INVENTORIES
    wanted = {k: v for k, v in inventories.items() if arguments.inventory in (None, k)}
    rows: list[Row] = []
    for name, inventory in wanted.items():
        chosen = [s for s in subjects() if re.search(arguments.only, s.name)]
        rows += measure(name, inventory, chosen, arguments.rounds, arguments.seconds)
        print(tables.steps(rows, name), flush=True)
    print(tables.step_headline(rows))
    if arguments.record:
        print(f"recorded in {harness.record('step', rows, stamp).name}")


def measure(
    name: str, inventory: Inventory, chosen: Sequence[Subject], rounds: int, seconds: float
) -> list[Row]:
    """One row per optimizer; every row carries the floors of this run."""
    truth = reference(inventory.shapes)
    timed: dict[str, Timed] = {}
    rows: dict[str, Row] = {}
    for subject in chosen:
        rows[subject.name] = row = {
            "inventory": name,
            "subject": subject.name,
            "package": subject.package,
            "version": subject.version,
            "products": subject.products,
            "method": subject.method,
            "same": subject.same,
            "native_bfloat16": "bfloat16" in native(),
        }
        if subject.version is None:
            row["failed"] = "not installed"
            continue
        print(f"{name}: {subject.name}", file=sys.stderr, flush=True)
        try:
            timed[subject.name] = _warm(subject, truth, row)
        except Exception as error:
            # A peer that breaks is a result too.
            row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
    machine: dict[str, Timed] = {}
    for dtype in native():
        machine[f"rate {dtype}"] = Timed(floors.square_product(PRODUCTS[dtype]))
        alone = floors.newton_schulz_products(inventory.shapes, PRODUCTS[dtype])
        machine[f"products {dtype}"] = Timed(alone)
    times = harness.interleave(timed | machine, rounds, seconds)
    shared = _floors(inventory, times)
    for subject_name, row in rows.items():
        if subject_name in timed:
            row |= harness.summary(times[subject_name])
        row |= shared
    return list(rows.values())


def _warm(subject: Subject, truth: Reference, row: Row) -> Timed:
    """Check a subject, which compiles what it compiles, and say how to time it."""
    settings = _settings()
    before = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running, params, quality = check(subject, truth)
    row |= quality | {"seconds_of_check": time.perf_counter() - before}
    assert _settings() == settings, f"{subject.name} changed a global setting of torch"
    return Timed(running.step, prepare=lambda: give(params, truth.gradients[-1]))


def _settings() -> tuple[object, ...]:
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


def native() -> list[str]:
    """The dtypes that the CPU multiplies, and for which there are floors."""
    both = multiplies_bfloat16(torch.device("cpu"))
    return ["float32", "bfloat16"] if both else ["float32"]


def _floors(inventory: Inventory, times: dict[str, list[float]]) -> Row:
    """Flops and seconds that no optimizer of this inventory can be faster than, per dtype."""
    flops = {
        "newton_schulz": floors.newton_schulz_flops(inventory.shapes),
        "two_products": floors.two_product_flops(inventory.shapes),
    }
    row: Row = {}
    for dtype in native():
        rate = 2 * floors.SIDE**3 / min(times[f"rate {dtype}"])
        row[f"flops_per_second_{dtype}"] = rate
        row[f"products_alone_{dtype}"] = min(times[f"products {dtype}"])
        for floor, count in flops.items():
            row[f"{floor}_floor_{dtype}"] = count / rate
    return row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to results/step.jsonl")
    parser.add_argument("--inventory", choices=INVENTORIES, help="only this one")
    parser.add_argument("--only", default="", help="a pattern for names of optimizers")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=30, help="at most, per optimizer")
    parser.add_argument("--threads", type=int, help="of torch; its default otherwise")
    parser.add_argument("--trial", action="store_true", help="small matrices")
    arguments = parser.parse_args()
    if arguments.record and (arguments.trial or arguments.only):
        parser.error("an inventory is recorded with all optimizers, or not at all")
    return arguments


if __name__ == "__main__":
    main()
