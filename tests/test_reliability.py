# SPDX-License-Identifier: Apache-2.0
"""What docs/reliability.md promises: saves that are killed, threads, long runs, no compiler."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import soak
import torch
from torch import nn

import fmuon

PACKAGE = Path(fmuon.__file__).parent
HERE = Path(__file__).parent


# ---- saves ---------------------------------------------------------------------------------------

SAVES = """
import os, sys, torch, fmuon
from pathlib import Path

model = torch.nn.Linear(256, 256)
optimizer = fmuon.FMuon(model, lr=0.01)
path = Path(sys.argv[1])
for number in range(10**6):
    model.weight.grad, model.bias.grad = torch.ones(256, 256), torch.ones(256)
    optimizer.step()
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save({"optimizer": optimizer.state_dict(), "number": number}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    print(number, flush=True)
"""


def test_a_process_killed_while_it_saves_leaves_a_whole_file(tmp_path):
    path = tmp_path / "checkpoint.pt"
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES, path], stdout=subprocess.PIPE, text=True
    )
    try:
        # Killed by the sight of an unfinished file, not at a moment of rest.
        first = int(process.stdout.readline())
        deadline = time.monotonic() + 60
        while not path.with_suffix(".unfinished").exists():
            assert time.monotonic() < deadline
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    saved = torch.load(path, weights_only=True)
    model = nn.Linear(256, 256)
    optimizer = fmuon.FMuon(model, lr=0.01)
    optimizer.load_state_dict(saved["optimizer"])
    assert saved["number"] >= first
    assert optimizer.state[model.weight]["step"] == saved["number"] + 1


# ---- threads -------------------------------------------------------------------------------------


def trained_alone(number, compiled):
    """The weights after some steps of an optimizer of its own."""
    generator = torch.Generator().manual_seed(number)
    weight = nn.Parameter(torch.randn(6, 4, generator=generator))
    optimizer = fmuon.FMuon([("w", weight)], lr=0.01 * (number + 1))
    opt = fmuon.muon(0.01)
    update = fmuon.compile(opt.update, backend="eager") if compiled else opt.update
    params = {"w": weight.detach().clone()}
    state = opt.init(params)
    for step in range(30):
        weight.grad = torch.randn(6, 4, generator=generator)
        optimizer.step()
        updates, state = update({"w": weight.grad}, state, step)
        params = fmuon.apply_updates(params, updates)
    return weight.detach(), params["w"]


@pytest.mark.parametrize("compiled", [False, True])
def test_optimizers_in_threads_do_what_they_do_alone(compiled):
    alone = [trained_alone(number, compiled) for number in range(3)]
    together, errors = {}, []

    def work(number):
        try:
            together[number] = trained_alone(number, compiled)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number, (weight, param) in enumerate(alone):
        assert torch.equal(weight, together[number][0])
        assert torch.equal(param, together[number][1])


# ---- long runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["FMuon", "update"])
def test_a_soak_makes_one_graph_and_doesn_t_grow_or_drift(form):
    report = soak.soak(form, steps=150, mark=50, backend="eager")
    assert report.graphs == 1
    # What is traced is small; a list of one tensor per step would be 100 objects of 500 bytes.
    assert report.traced[1] - report.traced[0] < 40_000 + 2 * report.traced[0]
    assert report.drift < 1e-4


# ---- no compiler ---------------------------------------------------------------------------------

STEP = """
import torch, fmuon
model = torch.nn.Linear(4, 4)
for p in model.parameters():
    p.grad = torch.ones_like(p)
before = model.weight.detach().clone()
fmuon.FMuon(model, lr=0.1).step()
assert not torch.equal(model.weight, before)
optimizer = fmuon.FMuon(model, lr=0.1, compile="default")
try:
    optimizer.step()
except fmuon.ConfigurationError as error:
    print(error)
else:
    print("stepped")
"""


def step_with(tmp_path, **environment):
    kept = {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    kept |= {"HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, env=kept | environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_without_a_compiler_eager_works_and_compiling_says_what_to_do(tmp_path):
    said = step_with(tmp_path, PATH=str(tmp_path), CXX="no-such-compiler")
    assert "install g++ or clang++" in said and "compile=False" in said


def test_with_compilation_disabled_a_mode_runs_eagerly(tmp_path):
    assert step_with(tmp_path, TORCH_COMPILE_DISABLE="1", PATH=str(tmp_path)) == "stepped\n"


# ---- names of torch ------------------------------------------------------------------------------


def names_of_torch(source):
    """Dotted names that begin at torch, and what is imported from it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            dotted = ast.unparse(node)
            if all(part.isidentifier() for part in dotted.split(".")):
                names.add(dotted)
    return names


def test_no_name_of_torch_is_used_that_2_11_has_not():
    """The list was compared with the sources and stubs of torch 2.11.0; check a name before adding."""
    used = set().union(*(names_of_torch(p.read_text()) for p in PACKAGE.glob("*.py")))
    known = set((HERE / "torch_names.txt").read_text().split())
    assert sorted(used - known) == []
    assert sorted(known - used) == []


def test_the_walk_finds_every_way_to_use_a_name():
    source = "import torch.new\nfrom torch.a import b as c\ntorch.x.y(1)\ntorch.f(2).g"
    assert names_of_torch(source) == {"torch.new", "torch.a.b", "torch.x.y", "torch.x", "torch.f"}
