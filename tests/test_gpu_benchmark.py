# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu.py as far as it goes without a GPU: its flow, deadline, checks and table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--device", "cpu", "--trial"]
UNCOMPILED = [
    "symmetric products agree",
    "eager steps agree",
    "gram form holds",
    "derivatives and vmap agree",
]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    # The tests of parity have a module of that name too.
    monkeypatch.delitem(sys.modules, "agreement", raising=False)
    import gpu

    return gpu


@pytest.mark.parametrize("name", UNCOMPILED)
def test_the_checks_pass_on_a_cpu(gpu, name):
    row = gpu._checked(name, "cpu", True, gpu.Deadline(60))
    assert row == {"case": "check", "name": name, "result": "passed"}


@pytest.mark.parametrize("name", UNCOMPILED)
def test_the_checks_see_wrong_products(gpu, name, monkeypatch):
    plain = gpu.symmetric.baddbmm

    def slightly_off(addend, left, right, *, beta, alpha=1.0):
        return plain(addend, left, right, beta=beta * 1.3, alpha=alpha)

    monkeypatch.setattr(gpu.symmetric, "baddbmm", slightly_off)
    result = gpu._checked(name, "cpu", True, gpu.Deadline(60))["result"]
    assert result.startswith("failed: AssertionError: ")


@pytest.mark.parametrize(("result", "status"), [("passed", 0), ("failed: x", 1)])
def test_the_exit_status_is_that_of_the_checks(gpu, monkeypatch, result, status, tmp_path, capsys):
    parts = [[{"case": "check", "name": "sums", "result": result}], []]
    monkeypatch.setattr(gpu, "_parts", lambda *arguments: iter(parts))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--trial"])
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(SystemExit) as exit:
        gpu.main()
    assert int(exit.value.code) == status
    assert f"| sums | {result} |" in capsys.readouterr().out
    (row,) = map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert row["result"] == result and row["environment"]["torch"] == torch.__version__


def test_what_the_deadline_leaves_out_is_named(gpu):
    over = gpu.Deadline(-1)
    assert gpu._checked("gram form holds", "cpu", True, over)["result"] == "not reached"
    rows = gpu.steps("trial", gpu.TRIAL["trial"], "cpu", True, over)
    assert {row["failed"] for row in rows} == {"not reached", "not installed"}
    table = gpu.tables.gpu(rows)
    for subject in gpu.subjects("default", trial=True):
        assert f"| {subject.name} |" in table


def test_the_table_shows_products_and_steps(gpu):
    times = {"seconds_min": 0.002, "seconds_median": 0.003, "repeats": 5}
    product = {"case": "product", "shape": (2, 256, 512), "dtype": "bfloat16"}
    step = {
        "case": "step", "title": "a model", "subject": "loop", "version": "1", "products": "none",
        "seconds_of_first_call": 1.25, "remarks": "", **times,
    }  # fmt: skip
    lower = times | {"seconds_min": 0.001}
    missed = product | {"failed": "not reached"}
    table = gpu.tables.gpu([product | {"plain": times, "lower": lower}, missed, step])
    assert "| 2 of 256 x 512 | bfloat16 | 2.000 | 1.000 | 2.00 |" in table
    assert "| 2 of 256 x 512 | bfloat16 | not reached |  |  |" in table
    assert "**a model**" in table and "| loop | 1 | none | 2.00 | 3.00 | 1.2 |  |" in table


def test_the_inventories_have_the_sizes_of_their_models(gpu):
    numbers = {k: sum(m * n for m, n in i.shapes) for k, i in gpu.GPU.items()}
    # Per layer 12 d^2, or 4 d^2 + 3 d h.
    assert numbers == {
        "gpt2-124m": 12 * 12 * 768**2,
        "llama-1b": 8 * (4 * 2048**2 + 3 * 2048 * 5632),
        "llama-7b": 2 * (4 * 4096**2 + 3 * 4096 * 11008),
    }


def test_without_a_gpu_it_says_so_and_measures_nothing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = ROOT / "benchmarks" / "gpu.sh"
    run = subprocess.run(
        ["bash", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert run.returncode == 2 and "there is no GPU here" in run.stderr


@pytest.mark.slow
def test_the_whole_flow_on_a_cpu(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(COMMAND, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {row["result"] for row in rows if row["case"] == "check"} == {"passed"}
    steps = {row["subject"]: row for row in rows if row["case"] == "step"}
    assert all("seconds_min" in row or row["version"] is None for row in steps.values())
    assert "FMuon compiled, Newton-Schulz" in steps and "dion.Muon, Triton" in steps
