# SPDX-License-Identifier: Apache-2.0
"""Every preset ends 20 steps where its peer does."""

import pytest
import table
from cases import cases

from fmuon.presets import PRESETS

CASES = {case.name: case for case in cases()}


@pytest.mark.parametrize("name", CASES)
def test_a_preset_moves_as_its_peer(name):
    case = CASES[name]
    found = case.run()
    assert found, "no leaf was compared"
    beyond = {
        leaf: (difference.value, case.allowed(leaf, difference))
        for leaf, difference in found.items()
        if not difference.value <= case.allowed(leaf, difference)
    }
    assert not beyond, f"{case.peer}: {beyond}"


def test_every_case_has_a_name_of_its_own():
    assert len(CASES) == len(cases())


def test_every_preset_is_compared():
    # muon_with_aux_adam is compared with its formulas in tests/test_presets.py.
    assert {case.preset for case in CASES.values()} == set(PRESETS) - {"muon_with_aux_adam"}


def test_the_table_is_of_these_cases():
    written = table.read()
    assert [row[:4] for row in written] == [row[:4] for row in table.rows(CASES.values())]
    assert all(float(found) <= float(allowed) for *_, found, allowed in written)
