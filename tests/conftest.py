# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# references.py and strategies.py are imported by name.
sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("tests", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()
