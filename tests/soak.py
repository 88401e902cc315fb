# SPDX-License-Identifier: Apache-2.0
"""Thousands of compiled steps: no recompile, no growth of memory, no drift.

    python tests/soak.py --steps 2000

`FMuon` with another pattern of missing gradients in every step, and the functional form with
`present=`, compiled, each beside its own eager form in float64 that makes the same steps. Prints the
graphs, the memory of the process and of Python at step 100 and at the end, and how far the weights
are from those of float64.
"""

import argparse
import gc
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fmuon
from fmuon import optimizer as optimizer_module

SHAPES = {"a": (8, 6), "b": (6, 8), "c": (8, 8), "bias": (8,), "norm": (6,)}
METHOD = fmuon.NewtonSchulz(dtype="float32")
OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


class Report(NamedTuple):
    """What a soak found; memory in bytes at the first mark and at the end."""

    graphs: int
    resident: tuple[int, int]
    traced: tuple[int, int]
    drift: float


def resident() -> int:
    """Bytes of this process in memory, by Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def soak(form: str, steps: int, mark: int, backend: str = "inductor") -> Report:
    """Run one form, "FMuon" or "update"."""
    torch.manual_seed(0)
    params = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    counter = CompileCounterWithBackend(backend)
    run = (_shim if form == "FMuon" else _functional)(params, counter)
    exact = _functional({name: p.double() for name, p in params.items()}, None)
    memory, traced, drift = [], [], 0.0
    for step in range(steps):
        if step == mark // 2:
            # Not while it compiles, which would take minutes.
            tracemalloc.start()
        generator = torch.Generator().manual_seed(step)
        # A drifting mean, so that weights go somewhere.
        grads = {
            name: torch.randn(p.shape, generator=generator) + 0.3 for name, p in params.items()
        }
        present = {name: (step * 7 + i * 3) % (i + 2) != 0 for i, name in enumerate(params)}
        new, wanted = run(step, grads, present), exact(step, grads, present)
        drift = max(
            (new[name].detach().double() - wanted[name]).norm().item() / wanted[name].norm().item()
            for name in params
        )
        if step + 1 in (mark, steps):
            gc.collect()
            memory.append(resident())
            traced.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return Report(counter.frame_count, (memory[0], memory[-1]), (traced[0], traced[-1]), drift)


def _shim(params, counter):
    leaves = {name: nn.Parameter(p.clone()) for name, p in params.items()}
    optimizer = fmuon.FMuon(leaves.items(), compile="default", orthogonalize=METHOD, **OPTIONS)

    def run(step, grads, present):
        for name, p in leaves.items():
            p.grad = grads[name] if present[name] else None
        kept = optimizer_module.compile_
        optimizer_module.compile_ = lambda function, mode: fmuon.compile(function, backend=counter)
        try:
            optimizer.step()
        finally:
            optimizer_module.compile_ = kept
        return leaves

    return run


def _functional(params, counter):
    opt = fmuon.muon(orthogonalize=METHOD if counter else fmuon.NewtonSchulz(), **OPTIONS)
    update = opt.update if counter is None else fmuon.compile(opt.update, backend=counter)
    held = {"params": params, "state": opt.init(params)}

    def run(step, grads, present):
        grads = {name: grad.to(params[name].dtype) for name, grad in grads.items()}
        flags = {name: torch.tensor(flag) for name, flag in present.items()}
        updates, held["state"] = update(grads, held["state"], step, held["params"], present=flags)
        held["params"] = fmuon.apply_updates(held["params"], updates)
        return held["params"]

    return run


def main() -> None:
    """Read the command line and run both forms."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mark", type=int, default=100, help="step of the first look at memory")
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    for form in ("FMuon", "update"):
        report = soak(form, arguments.steps, arguments.mark, arguments.backend)
        before, after = (value / 2**20 for value in report.resident)
        python = tuple(value / 2**10 for value in report.traced)
        print(
            f"{form}: {arguments.steps} steps by {arguments.backend}, {report.graphs} graph; "
            f"resident {before:.1f} MiB at step {arguments.mark}, {after:.1f} MiB at the end; "
            f"Python's objects {python[0]:.0f} KiB and {python[1]:.0f} KiB; "
            f"{report.drift:.1e} from float64"
        )


if __name__ == "__main__":
    main()
