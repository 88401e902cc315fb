# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_smoke_run_trains_saves_and_resumes(tmp_path):
    command = [sys.executable, EXAMPLES / "train_gpt.py", "--smoke"]
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "final validation loss" in printed.stdout and "blocks.0.qkv.weight" in printed.stdout
    whole = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    for curve in whole["curves"].values():
        assert curve["training_loss"][-1] < curve["training_loss"][0]
    resumed = [*command, "--resume", tmp_path / "out" / "checkpoint.pt"]
    subprocess.run(resumed, cwd=tmp_path, check=True, capture_output=True)
    again = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert again["curves"] == whole["curves"]
