# SPDX-License-Identifier: Apache-2.0
"""Every preset ends 20 steps where its peer does."""

import pytest
import table
from cases import cases, golden_many, golden_records

from fmuon.presets import PRESETS

CASES = {case.name: case for case in cases()}


def amplified():
    """Name -> the records of how far their own float32 form of Polar Express is from float64."""
    found = {}
    for preset, _, record, _, options in golden_records():
        # Stacks can't be flattened. In float32 a cautious decay may decide otherwise where an
        # update is nearly 0, ours and theirs.
        if "own" in record and record["case"] not in ("flatten", "cautious"):
            name = (record[key] for key in ("optimizer", "case", "spectrum", "schedule"))
            found["-".join(name)] = (preset, record, options)
    return found


AMPLIFIED = amplified()


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


@pytest.mark.parametrize("name", AMPLIFIED)
def test_in_float32_polar_express_is_no_further_from_float64_than_theirs(name):
    """Over a hundred problems of every shape; on a single one either may be the nearer."""
    preset, record, options = AMPLIFIED[name]
    ours = golden_many(preset, record, options)
    beyond = {
        leaf: (ours[leaf], theirs)
        for leaf, (theirs, _) in record["own"].items()
        if not ours[leaf] <= 1.25 * theirs
    }
    assert ours.keys() == record["own"].keys() and not beyond, beyond


def test_every_case_has_a_name_of_its_own():
    assert len(CASES) == len(cases())


@pytest.mark.parametrize("products", ["float64", "float32"])
def test_every_preset_is_compared(products):
    # These are compared with their formulas in tests/test_presets.py and tests/test_variants.py.
    formulas = {"muon_with_aux_adam", "muon_eq", "muon_plus"}
    found = {case.preset for case in CASES.values() if case.products == products}
    assert found == set(PRESETS) - formulas


def test_the_table_is_of_these_cases():
    written = table.read()
    assert [row[:4] for row in written] == [row[:4] for row in table.rows(CASES.values())]
    assert all(float(found) <= float(allowed) for *_, found, allowed, _ in written)
