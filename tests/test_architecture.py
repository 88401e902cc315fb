# SPDX-License-Identifier: Apache-2.0
"""The house that the docstring of the package describes, and what importing it costs."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fmuon

PACKAGE = Path(fmuon.__file__).parent
SOURCES = {path.stem: path.read_text() for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
TABLE = re.findall(r"^(\d+) \| (\w+) \| (.+)$", fmuon.__doc__, re.MULTILINE)
FLOORS = {module: int(floor) for floor, module, _ in TABLE}


def imported(source):
    """Dotted names that a source imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ("fmuon." if node.level else "") + (node.module or "")
            names |= {f"{module.rstrip('.')}.{alias.name}" for alias in node.names}
    return names


def rooms(source):
    """The modules of fmuon that a source imports; "" is the package itself."""
    parts = [name.split(".") for name in imported(source) if name.split(".")[0] == "fmuon"]
    return {next((part for part in own[1:] if part in FLOORS), "") for own in parts}


def not_below(source, module):
    """The modules that a source imports and that are not on a floor below its own."""
    return {room for room in rooms(source) if FLOORS.get(room, 99) >= FLOORS[module]}


def importers(prefix):
    """The modules that import a package, or something out of it."""
    return {
        module
        for module, source in SOURCES.items()
        if any(f"{name}.".startswith(f"{prefix}.") for name in imported(source))
    }


# ---- the table -----------------------------------------------------------------------------------


def test_every_module_has_one_row_and_every_row_a_module():
    rows = [module for _, module, _ in TABLE]
    assert sorted(rows) == sorted(SOURCES)


def test_the_rows_are_in_the_order_of_the_floors():
    assert list(FLOORS.values()) == sorted(FLOORS.values())


# ---- imports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_to_lower_floors(module):
    assert not_below(SOURCES[module], module) == set()


@pytest.mark.parametrize(
    "source",
    [
        "from fmuon.functional import muon",
        "from fmuon import functional",
        "import fmuon.functional",
        "import fmuon.functional as algorithm",
        "from .functional import muon",
        "from . import functional",
        "def late():\n    from fmuon.functional import muon",
    ],
)
def test_the_check_of_imports_catches_every_way_up(source):
    assert not_below(source, "base") == {"functional"}


def test_the_check_of_imports_catches_neighbours_and_the_package():
    assert not_below("from fmuon.scaling import SCALES", "coefficients") == {"scaling"}
    assert not_below("from fmuon import Matrix", "functional") == {""}
    assert not_below("import fmuon", "functional") == {""}


def test_the_check_of_imports_lets_ways_down_pass():
    assert not_below("import math\nfrom fmuon.base import Matrix", "functional") == set()


def test_only_tree_knows_the_pytrees_of_torch():
    assert importers("torch.utils._pytree") == {"tree"}


@pytest.mark.parametrize("module", ["coefficients", "scaling"])
def test_tables_of_numbers_import_no_torch(module):
    assert module not in importers("torch")


# ---- the one compile site ------------------------------------------------------------------------


def mentions_compile(source):
    """Whether a source calls torch.compile, decorates with it or hands it on, under any name."""
    attributes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return "torch.compile" in {*map(ast.unparse, attributes), *imported(source)}


def test_only_compilation_compiles():
    assert {m for m, source in SOURCES.items() if mentions_compile(source)} == {"compilation"}


@pytest.mark.parametrize(
    "source",
    ["torch.compile(f)", "@torch.compile\ndef f(): ...", "from torch import compile as fast"],
)
def test_the_check_for_compile_sites_catches_every_way_to_compile(source):
    assert mentions_compile(source)


def test_the_check_for_compile_sites_lets_other_names_pass():
    assert not mentions_compile("torch.compiler.is_compiling()\n'torch.compile(f)'")


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fmuon.__all__)
def test_no_public_name_hides_a_module(name):
    assert name not in SOURCES or isinstance(getattr(fmuon, name), ModuleType)


def test_modules_are_named_after_what_they_hold():
    # Besides names that say nothing: another package installs a `muon`, and Windows reserves `aux`.
    assert not set(SOURCES) & {"muon", "aux", "utils", "helpers", "common", "misc"}


def test_the_public_names_are_sorted_and_exist():
    assert fmuon.__all__ == sorted(fmuon.__all__)
    assert all(hasattr(fmuon, name) for name in fmuon.__all__)


# ---- importing it --------------------------------------------------------------------------------

PROBE = """
import json, sys, torch

def settings():
    return [
        torch.get_float32_matmul_precision(),
        str(torch.get_default_dtype()),
        torch.get_num_threads(),
        torch.initial_seed(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    ]

modules, before = set(sys.modules), settings()
import fmuon
print(json.dumps([sorted(set(sys.modules) - modules), before, settings()]))
"""


@pytest.fixture(scope="module")
def fresh_import():
    """(modules that fmuon adds to those of torch, settings before, settings after)."""
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, cwd="/"
    )
    # Anything that the import prints makes this fail.
    assert probe.stderr == ""
    return json.loads(probe.stdout)


def test_importing_fmuon_loads_nothing_heavy(fresh_import):
    heavy = ("torch.distributed.tensor", "torch._dynamo", "torchao", "numpy", "triton")
    added, _, _ = fresh_import
    assert "fmuon.functional" in added
    assert [name for name in added if f"{name}.".startswith(tuple(f"{h}." for h in heavy))] == []


def test_importing_fmuon_changes_no_global_setting(fresh_import):
    _, before, after = fresh_import
    assert before == after
