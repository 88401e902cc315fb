# SPDX-License-Identifier: Apache-2.0
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

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
