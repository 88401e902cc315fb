# SPDX-License-Identifier: Apache-2.0
"""On one NVIDIA GPU: are results right, and how long does one step take?

    bash benchmarks/gpu.sh                              all, in at most eight minutes
    python benchmarks/gpu.py --device cpu --trial       the same flow with tiny matrices

First the checks, then the symmetric product, then one step of every optimizer on every inventory,
with parameters and gradients in bfloat16. All optimizers take turns in one process; a time is that
between two CUDA events around a step that finds the GPU idle. After each part its rows are appended
to gpu.jsonl, in $OUT if that is set and in results/ otherwise. Before each case the deadline is
looked at, and what it leaves out is named. The exit status is 1 unless every check has passed.
"""

import argparse
import functools
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import harness
import peers
import tables
import torch
from agreement import Reference, check, give, reference
from harness import Row, Timed
from inventories import GPU, Inventory, Shape
from peers import LR, MOMENTUM, OPTIONS, Running, Subject
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fmuon
from fmuon import Auto, GramNewtonSchulz, NewtonSchulz, symmetric

# Seconds that a compile and its warm-up may take: no case begins with less left.
CASE = 45
# Sides of what is checked: the kernel takes those from `symmetric.SMALLEST_SIDE` on.
SHAPES: tuple[Shape, ...] = ((256, 384), (384, 256), (300, 300), (64, 96))
TINY: tuple[Shape, ...] = ((24, 32), (32, 24))
TRIAL = {"trial": Inventory("two small matrices, to try this", TINY)}
# (matrices, short, long) of the products that are timed.
PRODUCTS = (
    (48, 256, 1024), (24, 512, 2048), (24, 768, 768), (24, 768, 3072),
    (8, 2048, 2048), (8, 2048, 5632), (2, 4096, 4096), (2, 4096, 11008),
)  # fmt: skip


class Deadline:
    """When to begin nothing more."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left; negative when it is over."""
        return self._end - time.monotonic()


def main() -> None:
    """Check, time, print and record."""
    arguments = _arguments()
    device, trial = arguments.device, arguments.trial
    deadline = Deadline(60 * arguments.minutes)
    if trial:
        # Tiny matrices gain nothing by threads, and lose much on a busy machine.
        torch.set_num_threads(1)
    folder = Path(os.environ.get("OUT", harness.RESULTS))
    recorded = not trial or "OUT" in os.environ
    if recorded and folder == harness.RESULTS:
        harness.refuse_dirty_tree()
    stamp = harness.environment()
    rows: list[Row] = []
    for part in _parts(device, trial, deadline):
        if part and recorded:
            harness.record("gpu", part, stamp, folder)
        rows += part
    print(tables.gpu(rows))
    checks = [row["result"] for row in rows if row["case"] == "check"]
    sys.exit(any(result != "passed" for result in checks))


def _parts(device: str, trial: bool, deadline: Deadline) -> Iterator[list[Row]]:
    yield [_checked(name, device, trial, deadline) for name in CHECKS]
    if device == "cuda":
        yield products(deadline)
    inventories, reserve = TRIAL if trial else GPU, 0 if trial else CASE
    for done, (name, inventory) in enumerate(inventories.items()):
        # What is left is shared out evenly, so that no inventory goes without.
        share = Deadline((deadline.left() - reserve) / (len(inventories) - done))
        yield steps(name, inventory, device, trial, share)


def mode_on(device: str) -> str:
    """Of torch.compile: CUDA graphs, without the minutes that tuning every product takes."""
    return "reduce-overhead" if device == "cuda" else "default"


# ---- checks --------------------------------------------------------------------------------------

Check = Callable[[str, bool], None]


def _checked(name: str, device: str, trial: bool, deadline: Deadline) -> Row:
    row: Row = {"case": "check", "name": name, "result": "passed"}
    print(f"check: {name}", file=sys.stderr, flush=True)
    if deadline.left() < (0 if trial else CASE):
        return row | {"result": "not reached"}
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CHECKS[name](device, trial)
    except Exception as error:
        row["result"] = f"failed: {_one_line(error)}"
    return row


def eager_steps_agree(device: str, trial: bool) -> None:
    """Three steps of FMuon and of the pure update, with a loop in float64 on the CPU."""
    truth = reference(TINY if trial else SHAPES)
    for products in ("float32", "bfloat16"):
        for form in (NewtonSchulz, GramNewtonSchulz):
            method = form(dtype=products)
            for build in (peers.shim(method, compile=False), peers.functional(method, None)):
                check(Subject(str(method), "fmuon", products, build), truth, device)
    # On a CPU its choice may be another function than Newton-Schulz.
    if device == "cuda":
        check(Subject("auto", "fmuon", "bfloat16", peers.shim(Auto(), False)), truth, device)


def compiled_steps_agree(device: str, trial: bool) -> None:
    """The same compiled, with the graphs in which the steps are timed."""
    truth, mode = reference(TINY if trial else SHAPES), mode_on(device)
    pure = peers.functional(NewtonSchulz(dtype="bfloat16"), mode)
    check(Subject("update", "fmuon", "bfloat16", pure), truth, device)
    if not trial:
        shim = peers.shim(GramNewtonSchulz(dtype="bfloat16"), mode)
        check(Subject("FMuon", "fmuon", "bfloat16", shim), truth, device)


def symmetric_products_agree(device: str, trial: bool) -> None:
    """With the plain product in float64, within one rounding; to the last bit symmetric."""
    for dtype, tolerance in (
        (torch.float32, 1e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-7),
    ):  # fmt: skip
        for m, n in ((32, 40), (17, 9)) if trial else ((256, 256), (300, 1000), (1031, 77)):
            wide = torch.randn(3, m, n, device=device).to(dtype) / max(m, n) ** 0.5
            for x in (wide, wide.mT.contiguous().mT):
                a, b = x @ x.mT, x.double().cpu()
                exact = b @ b.mT
                _near(symmetric.product(x, x.mT), exact, tolerance)
                square = a.double().cpu()
                fused = torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315)
                _near(symmetric.baddbmm(a, a, a, beta=-4.775, alpha=2.0315), fused, tolerance)
                if device != "cuda":
                    continue
                # The kernel itself, also where it isn't taken.
                taken = dtype != torch.float32 and m >= symmetric.SMALLEST_SIDE
                assert symmetric.takes_kernel(x) == taken, (
                    f"{dtype}, side {m}: taken is not {taken}"
                )
                for result, truth in (
                    (symmetric.lower_tiles(x, x.mT), exact),
                    (symmetric.lower_tiles(a, a, a, -4.775, 2.0315), fused),
                ):
                    _near(result, truth, tolerance)
                    assert torch.equal(result, result.mT), f"{dtype}, side {m}: not symmetric"


def derivatives_and_vmap_agree(device: str, trial: bool) -> None:
    """vmap with the loop, and the gradient with that in float64 on the CPU."""
    m, n = (12, 16) if trial else (256, 320)
    x = torch.randn(3, m, n, device=device)
    method = NewtonSchulz(dtype="bfloat16")
    _near(torch.func.vmap(method)(x), torch.stack([method(y) for y in x]).double(), 0.05)
    weight = torch.randn(m, n)

    def slope(y: Tensor, dtype: str) -> Tensor:
        y = y.detach().requires_grad_()
        (NewtonSchulz(dtype=dtype)(y) * weight.to(y)).sum().backward()
        assert y.grad is not None
        return y.grad

    exact = slope(x[0].double().cpu(), "float64")
    _near(slope(x[0], "float32"), exact, 1e-3)
    # Five steps of slope 3.4 back and forth, in 8 bits.
    _near(slope(x[0], "bfloat16"), exact, 0.3)


def results_outlive_their_graph(device: str, trial: bool) -> None:
    """In the default mode: updates and state of a step are as they were, three steps later."""
    m, n = TINY[0] if trial else SHAPES[0]
    opt = fmuon.muon(orthogonalize=NewtonSchulz(dtype="bfloat16"), **OPTIONS)
    update = fmuon.compile(opt.update, "max-autotune" if device == "cuda" else "default")
    grads = {"w": torch.randn(m, n, device=device)}
    state, kept = opt.init(grads), []
    for step in range(6):
        updates, state = update({"w": torch.randn(m, n, device=device)}, state, step)
        tensors = [updates["w"], *_tensors(state)]
        kept.append((tensors, [t.clone() for t in tensors]))
        for tensors, copies in kept[-4:]:
            same = all(torch.equal(t, c) for t, c in zip(tensors, copies, strict=True))
            assert same, f"something of an earlier step was written over by step {step}"


def gram_form_holds(device: str, trial: bool) -> None:
    """With its restarts, on decaying spectra: not much further from float64 than standard."""
    side = 32 if trial else 256
    # Measured on a CPU: up to 1.2 times as far in bfloat16 and 5.7 in float16, which has one
    # restart to the two of bfloat16.
    for dtype, allowed in (("bfloat16", 2), ("float16", 8)):
        for name in ("jordan", "polar_express"):
            for last in (-3, -7):
                u, v = (torch.linalg.qr(torch.randn(n, side).double()).Q for n in (side, 2 * side))
                x = (u * torch.logspace(0, last, side, dtype=torch.float64)) @ v.mT
                exact = NewtonSchulz(name)(x)
                y = x.float().to(device)
                standard = _distance(NewtonSchulz(name, dtype=dtype)(y), exact)
                _near(GramNewtonSchulz(name, dtype=dtype)(y), exact, allowed * standard)


def fmuon_is_one_graph(device: str, _: bool) -> None:
    """Over steps with other learning rates, and without a break."""
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in TINY]
    group = {"params": params, "use_muon": True}
    method = NewtonSchulz(dtype="bfloat16")
    optimizer = fmuon.FMuon([group], compile=mode_on(device), orthogonalize=method)
    counters.clear()
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        give(params, [torch.randn(shape) for shape in TINY])
        optimizer.step()
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    assert graphs == 1 and not breaks, f"{graphs} graphs, breaks {breaks}"


CHECKS: dict[str, Check] = {
    check.__name__.replace("_", " "): check
    for check in (
        symmetric_products_agree,
        eager_steps_agree,
        gram_form_holds,
        derivatives_and_vmap_agree,
        compiled_steps_agree,
        fmuon_is_one_graph,
        results_outlive_their_graph,
    )
}


def _distance(result: Tensor, exact: Tensor) -> float:
    return ((result.double().cpu() - exact.cpu()).norm() / exact.norm()).item()


def _near(result: Tensor, exact: Tensor, tolerance: float) -> None:
    distance = _distance(result, exact)
    # NaN is near to nothing.
    assert distance < tolerance, (
        f"{tuple(result.shape)} in {result.dtype} is off by {distance:.1e}, allowed {tolerance:.1e}"
    )


def _tensors(state: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


# ---- products ------------------------------------------------------------------------------------


def products(deadline: Deadline) -> list[Row]:
    """X X^T by cuBLAS and by the kernel, also in float32, where the kernel isn't taken."""
    rows: list[Row] = []
    for k, m, n in PRODUCTS:
        for dtype in (torch.bfloat16, torch.float32):
            row = {"case": "product", "shape": (k, m, n), "dtype": str(dtype).split(".")[1]}
            if deadline.left() < CASE:
                rows.append(row | {"failed": "not reached"})
                continue
            x = torch.randn(k, m, n, device="cuda", dtype=dtype)
            subjects = {
                "plain": Timed(functools.partial(torch.matmul, x, x.mT)),
                "lower": Timed(functools.partial(symmetric.lower_tiles, x, x.mT)),
            }
            for subject in subjects.values():
                for _ in range(3):
                    subject.step()
            times = harness.interleave(subjects, 20, 0.5, harness.gpu_seconds)
            rows.append(row | {name: harness.summary(times[name]) for name in subjects})
    return rows


# ---- steps ---------------------------------------------------------------------------------------


def subjects(mode: str, trial: bool) -> list[Subject]:
    """What is timed, the most wanted first: the deadline cuts off the end.

    A trial compiles one method in one form.
    """
    methods = {
        "Newton-Schulz": (NewtonSchulz(dtype="bfloat16"), "newton_schulz"),
        "Gram form": (GramNewtonSchulz(dtype="bfloat16"), "gram"),
        "Auto": (Auto(), "auto"),
    }
    methods = dict(list(methods.items())[:1]) if trial else methods
    shims = [
        Subject(f"FMuon compiled, {k}", "fmuon", "bfloat16", peers.shim(m, mode), kind)
        for k, (m, kind) in methods.items()
    ]
    pure = [
        Subject(f"update compiled, {k}", "fmuon", "bfloat16", peers.functional(m, mode), kind)
        for k, (m, kind) in methods.items()
    ]
    torchs = [
        Subject("torch.optim.Muon", "torch", "bfloat16", peers.optimizer(peers.torch_muon)),
        Subject("torch.optim.Muon, step compiled", "torch", "bfloat16", _compiled_torch(mode)),
    ]
    by_hand = Subject("loop by hand", "torch", "bfloat16", peers.loop)
    return [by_hand, torchs[0], *shims, *_PACKAGES, torchs[1], *([] if trial else pure)]


def steps(
    name: str, inventory: Inventory, device: str, trial: bool, deadline: Deadline
) -> list[Row]:
    """One row per optimizer."""
    shared = {
        "case": "step", "inventory": name, "title": inventory.title, "mode": mode_on(device),
        "matrices": len(inventory.shapes), "numbers": sum(m * n for m, n in inventory.shapes),
        "device": device,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in inventory.shapes
    ]
    gradients = [torch.randn_like(w) for w in weights]
    small = reference(TINY if trial else SHAPES)
    timed: dict[str, Timed] = {}
    rows: dict[str, Row] = {}
    for subject in subjects(mode_on(device), trial):
        rows[subject.name] = row = shared | {
            "subject": subject.name, "package": subject.package, "version": subject.version,
            "products": subject.products, "method": subject.method, "same": subject.same,
        }  # fmt: skip
        if subject.version is None:
            row["failed"] = "not installed"
        elif deadline.left() < 0:
            row["failed"] = "not reached"
        else:
            print(f"{name}: {subject.name}", file=sys.stderr, flush=True)
            try:
                timed[subject.name] = _warm(subject, small, weights, gradients, device, row)
            except Exception as error:
                # A peer that breaks is a result too.
                row["failed"] = _one_line(error)
    clock = harness.gpu_seconds if device == "cuda" else harness.wall_seconds
    times = harness.interleave(timed, 3 if trial else 20, 2.0, clock) if timed else {}
    for subject_name in timed:
        rows[subject_name] |= harness.summary(times[subject_name])
    timed.clear()
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
    return list(rows.values())


def _warm(
    subject: Subject,
    small: Reference,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    device: str,
    row: Row,
) -> Timed:
    """Compare a peer on small matrices with float64, and warm it up on these."""
    remarks = [] if subject.same else [f"another step: {subject.method}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if subject.package != "fmuon" and "compiled" not in subject.name:
            row |= check(subject, small, device)[2]
        params = [nn.Parameter(w.clone()) for w in weights]
        running = subject.build(params)
        skips = counters["inductor"]["cudagraph_skips"]
        for turn in range(4):
            give(params, gradients)
            before = time.perf_counter()
            running.step()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn == 0:
                row["seconds_of_first_call"] = time.perf_counter() - before
    assert all(w.isfinite().all() for w in running.weights()), "weights are not finite"
    if counters["inductor"]["cudagraph_skips"] > skips:
        remarks.append("torch.compile did without CUDA graphs")
    row["remarks"] = "; ".join(remarks)
    return Timed(running.step, prepare=lambda: give(params, gradients))


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return text.replace("|", "/")[:200]


# ---- peers ---------------------------------------------------------------------------------------


def _compiled_torch(mode: str) -> peers.Build:
    def build(params: list[nn.Parameter]) -> Running:
        return Running(torch.compile(peers.torch_muon(params).step, mode=mode), lambda: params)

    return build


def _dion(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from dion import Muon

    return Muon(
        params, lr=LR, mu=MOMENTUM, weight_decay=0.0, nesterov=True, use_triton=True,
        use_polar_express=False,
    )  # fmt: skip


def _gram_newton_schulz(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from gram_newton_schulz import Muon

    return Muon(
        params, lr=LR, momentum=MOMENTUM, weight_decay=0.0, ns_coefficients=[peers.TRIPLE] * 5,
        adjust_lr=lambda lr, shape: lr * max(1.0, shape[-2] / shape[-1]) ** 0.5,
    )  # fmt: skip


def _emerging(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from emerging_optimizers.orthogonalized_optimizers import Muon

    return Muon(
        params, lr=LR, momentum=MOMENTUM, weight_decay=0.0, nesterov=True,
        coefficient_type="simple", scale_mode="shape_scaling", use_syrk=True,
    )  # fmt: skip


def _flash_muon(params: list[nn.Parameter]) -> Running:
    """Its iteration in the loop by hand: its class needs a process group."""
    from flash_muon.muon import fast_newtonschulz

    return peers.loop(params, functools.partial(fast_newtonschulz, steps=5))


_PACKAGES = (
    Subject(
        "dion.Muon, Triton", "dion", "bfloat16", peers.optimizer(_dion),
        "scale sqrt(rows / columns)", same=False,
    ),
    Subject(
        "gram_newton_schulz.Muon", "gram-newton-schulz", "float16",
        peers.optimizer(_gram_newton_schulz), "gram",
    ),
    Subject(
        "emerging_optimizers.Muon, syrk", "emerging-optimizers", "bfloat16",
        peers.optimizer(_emerging),
    ),
    Subject("flash_muon in the loop by hand", "flash-muon", "bfloat16", _flash_muon),
)  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trial", action="store_true", help="tiny matrices, recorded only in $OUT")
    parser.add_argument("--minutes", type=float, default=7, help="after which no case begins")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --trial runs the flow without one")
    if arguments.device == "cpu" and not arguments.trial:
        parser.error("on a CPU this is only tried, with --trial; step.py measures there")
    return arguments


if __name__ == "__main__":
    main()
