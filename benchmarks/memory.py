# SPDX-License-Identifier: Apache-2.0
"""How much memory does a step need at its peak, over what lies there before and after it?

    python benchmarks/memory.py                         print the table
    python benchmarks/memory.py --record                and append it to results/memory.jsonl
    python benchmarks/memory.py --inventory llama-512

Bytes are counted from the allocator's events in torch.profiler, which sees eager tensors and the
buffers of compiled code alike; a known case is measured first. What the BLAS library keeps for
itself is not seen; it serves the same products in all.

A step of an optimizer finds gradients in place; a train step makes them. The two are compared with
a hand-written loop of each kind, which updates one matrix after the other in place.

All products are in float32.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import harness
import tables
import torch
from harness import Row
from inventories import INVENTORIES, TRIAL, Inventory
from peers import LR, MODE, OPTIONS, loop_step, pure_step
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fmuon

BATCH = 8
METHOD = fmuon.NewtonSchulz(dtype="float32")


class Running(NamedTuple):
    """A step, and all tensors that outlive it."""

    step: Callable[[], Any]
    tensors: Callable[[], Any]


Build: TypeAlias = Callable[[list[nn.Parameter]], Running]


def main() -> None:
    """Measure the inventories that were asked for."""
    arguments = _arguments()
    if arguments.record:
        harness.refuse_dirty_tree()
    check_meter()
    stamp = harness.environment()
    inventories = TRIAL if arguments.trial else INVENTORIES
    rows: list[Row] = []
    for name, inventory in inventories.items():
        if arguments.inventory in (None, name):
            rows += measure(name, inventory)
    print(tables.memory(rows))
    if arguments.record:
        print(f"recorded in {harness.record('memory', rows, stamp).name}")


def measure(name: str, inventory: Inventory) -> list[Row]:
    """One row per subject: steady bytes and bytes at the peak."""
    rows: list[Row] = []
    for kind, subjects in SUBJECTS.items():
        for subject, build in subjects.items():
            torch.manual_seed(0)
            running = build([nn.Parameter(torch.randn(shape)) for shape in inventory.shapes])
            for _ in range(3):
                running.step()
            steady = _bytes(running.tensors())
            rows.append(
                {
                    "inventory": name,
                    "kind": kind,
                    "subject": subject,
                    "steady_bytes": steady,
                    "peak_bytes": steady + extra_bytes(running.step),
                }
            )
    return rows


# ---- the meter -----------------------------------------------------------------------------------


def extra_bytes(function: Callable[[], Any]) -> int:
    """Largest number of bytes alive at a time during a call, less those alive before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def check_meter() -> None:
    """Two allocations one after the other, eager; and two buffers at a time of compiled code."""
    n = 2**20

    def one_after_the_other() -> None:
        first = torch.empty(16 * n)
        del first
        torch.empty(8 * n)

    x = torch.randn(2048, 2048)
    chain = torch.compile(lambda x: ((x @ x) @ x).sum())
    chain(x)
    for function, expected in ((one_after_the_other, 64 * n), (lambda: chain(x), 32 * n)):
        measured = extra_bytes(function)
        if abs(measured - expected) > 4096:
            raise SystemExit(f"the meter says {measured} bytes where {expected} are right")


def _bytes(tensors: Any) -> int:
    """Of the storages behind all tensors of a pytree, each counted once."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(tensors) if isinstance(t, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in leaves}
    return sum(storages.values())


# ---- hand-written --------------------------------------------------------------------------------


def _hand_written(params: list[nn.Parameter]) -> Running:
    _give(params)
    momentum = [torch.zeros_like(p) for p in params]
    return Running(
        lambda: loop_step(params, momentum),
        lambda: [params, [p.grad for p in params], momentum],
    )


def _hand_written_training(params: list[nn.Parameter]) -> Running:
    momentum = [torch.zeros_like(p, requires_grad=False) for p in params]
    inputs = _inputs(params)

    def step() -> None:
        _loss(params, inputs).backward()
        loop_step(params, momentum)
        for p in params:
            p.grad = None

    return Running(step, lambda: [params, momentum, inputs])


# ---- the others ----------------------------------------------------------------------------------


def _optimizer(make: Callable[[list[nn.Parameter]], Any]) -> Build:
    def build(params: list[nn.Parameter]) -> Running:
        _give(params)
        optimizer = make(params)
        return Running(
            optimizer.step,
            lambda: [params, [p.grad for p in params], list(optimizer.state.values())],
        )

    return build


def _shim(params: list[nn.Parameter], compile: str | bool) -> fmuon.FMuon:
    group = {"params": params, "use_muon": True}
    return fmuon.FMuon([group], compile=compile, orthogonalize=METHOD, **OPTIONS)


def _functional(mode: str | None) -> Build:
    """fmuon.update: the old weights and state stay valid until the new ones are there."""

    def build(params: list[nn.Parameter]) -> Running:
        opt = fmuon.muon(orthogonalize=METHOD, **OPTIONS)
        weights: dict[str, Tensor] = {str(i): p.detach() for i, p in enumerate(params)}
        grads = {name: torch.randn_like(w) for name, w in weights.items()}
        function, state = pure_step(opt, mode), opt.init(weights)

        def step() -> None:
            nonlocal weights, state
            weights, state = function(weights, grads, state, 0)

        return Running(step, lambda: [weights, grads, state])

    return build


def _training(in_place: bool) -> Build:
    """One compiled graph of gradients and update, pure or writing over weights and state."""

    def build(params: list[nn.Parameter]) -> Running:
        opt = fmuon.muon(orthogonalize=METHOD, **OPTIONS)
        weights: dict[str, Tensor] = {str(i): p.detach() for i, p in enumerate(params)}
        state, inputs = opt.init(weights), _inputs(params)

        def function(weights: Any, state: Any, step: Any, inputs: Any) -> Any:
            grads = torch.func.grad(lambda w: _loss(list(w.values()), inputs))(weights)
            if in_place:
                fmuon.update_(opt, weights, grads, state, step)
                return weights, state
            updates, state = opt.update(grads, state, step)
            return fmuon.apply_updates(weights, updates), state

        compiled = fmuon.compile(function, MODE)

        def step() -> None:
            nonlocal weights, state
            weights, state = compiled(weights, state, 0, inputs)

        return Running(step, lambda: [weights, state, inputs])

    return build


def _give(params: Sequence[nn.Parameter]) -> None:
    for p in params:
        p.grad = torch.randn_like(p)


def _inputs(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.randn(BATCH, p.shape[1]) for p in params]


def _loss(weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """A model as small as can be that gives every matrix [m, n] a gradient."""
    outputs = [x @ w.T for x, w in zip(inputs, weights, strict=True)]
    return torch.stack([y.square().mean() for y in outputs]).sum()


SUBJECTS: dict[str, dict[str, Build]] = {
    "optimizer step": {
        "hand-written": _hand_written,
        "torch.optim.AdamW": _optimizer(lambda params: torch.optim.AdamW(params, lr=LR)),
        "FMuon": _optimizer(lambda params: _shim(params, compile=False)),
        "FMuon compiled": _optimizer(lambda params: _shim(params, compile=MODE)),
        "update": _functional(None),
        "update compiled": _functional(MODE),
    },
    "train step": {
        "hand-written": _hand_written_training,
        "update, compiled": _training(in_place=False),
        "update_, compiled": _training(in_place=True),
    },
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to results/memory.jsonl")
    parser.add_argument("--inventory", choices=INVENTORIES, help="only this one")
    parser.add_argument("--trial", action="store_true", help="small matrices")
    arguments = parser.parse_args()
    if arguments.record and arguments.trial:
        parser.error("a trial is not recorded")
    return arguments


if __name__ == "__main__":
    main()
