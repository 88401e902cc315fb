# SPDX-License-Identifier: Apache-2.0
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch._dynamo.testing import CompileCounterWithBackend

import fmuon
from fmuon import optimizer as optimizer_module

# references.py and strategies.py are imported by name.
sys.path.insert(0, str(Path(__file__).parent))

# The comparisons with real peers need the extra `parity`; `make parity` installs and runs them.
collect_ignore = [] if importlib.util.find_spec("optax") else ["parity"]

settings.register_profile("tests", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def counter(monkeypatch):
    """Counts the graphs of `FMuon`, and runs them without inductor."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(
        optimizer_module, "compile_", lambda step, mode: fmuon.compile(step, backend=counter)
    )
    return counter


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
