# SPDX-License-Identifier: Apache-2.0
"""Draw a recorded run: loss, time against quality, update sizes and orthogonality.

    python examples/report.py examples/results/curves.json      the picture next to it
    python examples/report.py RUN.json --out out/picture.png
    python examples/report.py --smoke                           records a short run and draws it

RUN.json is an object. Of its keys, `title` is the heading; `curves` holds, under the name of each
line, a run or a list of runs that differ in the seed:

    training_loss      of every step, a list
    seconds            that every step took, a list
    validation_loss    {number of steps: loss after them}

and `metrics`, which may be left out, what FMuon.metrics() said of one run:

    steps                        after which of them it was asked, a list
    update_rms, orthogonality    {parameter: its value at each of those steps}

examples/train_gpt.py writes such files as curves.json, examples/evidence/compare.py one for each
task. Here, `record` shows how a training loop makes one.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import fmuon


def record(steps: int = 60) -> dict[str, Any]:
    """A short run with FMuon, as this example reads it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    model.add_module("head", nn.Linear(64, 4))
    x = torch.randn(2048, 16)
    y = torch.sin(x[:, :4] + x[:, 4:8] * x[:, 8:12])
    optimizer = fmuon.FMuon(model, lr=1e-2, metrics=("update_rms", "orthogonality"))
    run: dict[str, Any] = {"training_loss": [], "seconds": [], "validation_loss": {}}
    metrics: dict[str, Any] = {"steps": [], "update_rms": {}, "orthogonality": {}}
    for step in range(1, steps + 1):
        began = time.perf_counter()
        chosen = torch.randint(1024, (128,))
        loss = (model(x[chosen]) - y[chosen]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run["training_loss"].append(loss.item())
        run["seconds"].append(time.perf_counter() - began)
        if step % 5 == 0:
            with torch.no_grad():
                loss = (model(x[1024:]) - y[1024:]).square().mean()
            run["validation_loss"][step] = loss.item()
            metrics["steps"].append(step)
            for key, value in optimizer.metrics().items():
                _, metric, leaf = key.split("/")
                metrics[metric].setdefault(leaf, []).append(value)
    return {"title": "A short run", "curves": {"FMuon": run}, "metrics": metrics}


def draw(path: Path, run: Mapping[str, Any]) -> None:
    """The picture of a record."""
    metrics = run.get("metrics")
    figure = Figure(figsize=(10, 7.5 if metrics else 4), layout="constrained")
    panels = figure.subplots(2 if metrics else 1, 2, squeeze=False)
    by_step, by_time = panels[0]
    for number, (name, curve) in enumerate(run["curves"].items()):
        draw_losses(by_step, by_time, name, curve if isinstance(curve, list) else [curve], number)
    by_step.set(xlabel="steps", ylabel="loss; training pale", xlim=0)
    by_time.set(xlabel="seconds in these steps", ylabel="validation loss", xlim=0)
    by_step.legend()
    if metrics:
        draw_metric(panels[1][0], metrics, "update_rms")
        draw_metric(panels[1][1], metrics, "orthogonality")
        panels[1][0].set(yscale="log", ylabel="RMS of the update")
        panels[1][0].legend()
        panels[1][1].set(ylim=0, ylabel="orthogonality: RMS of s² - 1")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    figure.suptitle(run.get("title", path.stem))
    figure.savefig(path, dpi=100)


def draw_losses(
    by_step: Axes, by_time: Axes, name: str, runs: Sequence[Mapping[str, Any]], number: int
) -> None:
    """The mean over the seeds, and from the lowest to the highest as a band."""
    colour = f"C{number}"
    training = [fmean(losses) for losses in zip(*(r["training_loss"] for r in runs), strict=True)]
    by_step.plot(range(1, len(training) + 1), training, color=colour, alpha=0.25, linewidth=0.8)
    # The keys of a JSON object are text.
    steps = [int(step) for step in runs[0]["validation_loss"]]
    losses = [list(r["validation_loss"].values()) for r in runs]
    seeds = list(zip(*losses, strict=True))
    mean = [fmean(values) for values in seeds]
    label = f"{name}, {mean[-1]:.3f} at the end"
    by_step.plot(steps, mean, color=colour, label=label)
    clocks = [list(accumulate(r["seconds"])) for r in runs]
    seconds = [fmean(clock[step - 1] for clock in clocks) for step in steps]
    by_time.plot(seconds, mean, color=colour)
    for axes, x in ((by_step, steps), (by_time, seconds)):
        lowest, highest = ([bound(values) for values in seeds] for bound in (min, max))
        axes.fill_between(x, lowest, highest, color=colour, alpha=0.15)


def draw_metric(axes: Axes, metrics: Mapping[str, Any], metric: str) -> None:
    """A thin line for each parameter, those of Muon in one colour and the rest in another."""
    labelled: set[str] = set()
    for leaf, values in metrics[metric].items():
        # Only what Muon trains has an orthogonality.
        kind = "by Muon" if leaf in metrics["orthogonality"] else "by the auxiliary rule"
        style = {"color": "C0", "zorder": 3} if kind == "by Muon" else {"color": "C7"}
        label = None if kind in labelled else kind
        axes.plot(metrics["steps"], values, linewidth=0.8, label=label, **style)
        labelled.add(kind)
    axes.set(xlabel="steps", xlim=0)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN.json")
    parser.add_argument("--out", type=Path, help="the picture, else RUN.png")
    parser.add_argument("--smoke", action="store_true", help="record a run first, as RUN.json")
    arguments = parser.parse_args()
    path: Path | None = arguments.run
    if arguments.smoke:
        path = path or Path("out/report.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record(), indent=1) + "\n")
    if path is None:
        parser.error("which RUN.json?")
    out = arguments.out or path.with_suffix(".png")
    draw(out, json.loads(path.read_text()))
    print(out)


if __name__ == "__main__":
    main()
