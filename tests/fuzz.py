# SPDX-License-Identifier: Apache-2.0
"""The fuzz tests with a large budget, and how much they tried.

python tests/fuzz.py --examples 500 --seed 0
"""

import argparse
import time

import test_fuzz
import test_stateful
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test


def main() -> None:
    """Run each with the seed, and print a line of figures for it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    budget = settings(
        max_examples=arguments.examples, stateful_step_count=test_stateful.STEPS, deadline=None,
        database=None,
    )  # fmt: skip
    for name, run in {
        "calls of FMuon in any order": lambda: machine(test_stateful.Shim, budget, arguments.seed),
        "calls of the core in any order": lambda: machine(
            test_stateful.Core, budget, arguments.seed
        ),
        "wrong options": lambda: cases(test_fuzz.wrong_options, budget, arguments.seed),
        "damaged state dicts": lambda: cases(test_fuzz.damages, budget, arguments.seed),
    }.items():
        start = time.perf_counter()
        run()
        print(f"{name}: seed {arguments.seed}, {time.perf_counter() - start:.0f} s, no failure")
    for what, count in (test_stateful.TRIED + test_fuzz.TRIED).items():
        print(f"{what}: {count}")


def machine(kind, budget, number):
    """Run a state machine."""
    seed(number)(kind)
    run_state_machine_as_test(kind, settings=budget)


def cases(body, budget, number):
    """Run a test of drawn data."""
    seed(number)(budget(given(st.data())(body)))()


if __name__ == "__main__":
    main()
