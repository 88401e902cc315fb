# SPDX-License-Identifier: Apache-2.0
"""Does a learning rate carry over to another width? Every scale rule, at several widths.

    python examples/evidence/scales.py            minutes on a CPU
    python examples/evidence/scales.py --smoke    two widths and a few steps

A multilayer perceptron without biases on scikit-learn's digits; Muon trains all of its matrices,
the first and the last too, so that its learning rate is the only one. Every rule gets the same
rates, a factor of 2 apart, and more until no width is best at an end. Writes scales.json and
scales.png.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compare import digits, environment, finite, rank
from matplotlib.figure import Figure
from tasks import Digits, loss_and_accuracy
from torch import nn
from train_gpt import warmup_cosine

import fmuon
from fmuon.scaling import SCALES

WIDTHS = (16, 64, 256)
SEEDS = (0, 1)
EXPONENTS = range(-6, 1)  # of 2, the rates to begin with


def make_model(width: int) -> nn.Module:
    """64 pixels -> 10 classes by three hidden layers."""
    sizes = (64, width, width, width, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, bias=False), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def train(task: Digits, rule: str, width: int, lr: float, seed: int) -> float:
    """The loss on what is held out, after the last step."""
    torch.manual_seed(seed)
    model = make_model(width)
    optimizer = fmuon.FMuon(model, lr, weight_decay=0.0, scale=rule, labels={"re:.*": "muon"})
    factors = [*warmup_cosine(torch.arange(task.steps), task.steps).tolist(), 0.0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors.__getitem__)
    for inputs, classes in task.training(seed):
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss_and_accuracy(task, model, task.held_out("reported"))[0]


def sweep(
    task: Digits, rule: str, widths: Sequence[int], seeds: Sequence[int]
) -> dict[int, dict[float, float]]:
    """Width -> learning rate -> mean loss over the seeds."""
    losses: dict[int, dict[int, float]] = {width: {} for width in widths}
    first, last = EXPONENTS[0], EXPONENTS[-1]
    while True:
        for width, own in losses.items():
            for k in range(first, last + 1):
                if k not in own:
                    own[k] = statistics.fmean(
                        train(task, rule, width, 2.0**k, seed) for seed in seeds
                    )
                    print(f"{rule:16} {width:4}  lr 2^{k:<4} {own[k]:.4f}", flush=True)
        best = {min(own, key=lambda k: rank(own[k])) for own in losses.values()}
        if first not in best and last not in best:
            break
        first, last = first - (first in best), last + (last in best)
    return {w: {2.0**k: own[k] for k in sorted(own)} for w, own in losses.items()}


def draw(path: Path, record: Mapping[str, Any]) -> None:
    """A panel for each rule, in it a line for each width."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(record["loss"]), sharey=True)
    lowest = math.inf
    for axes, (rule, widths) in zip(panels, record["loss"].items(), strict=True):
        for i, (width, line) in enumerate(widths.items()):
            # A line ends where the loss is no number.
            points = [(float(lr), loss) for lr, loss in line.items() if loss is not None]
            best = min(points, key=lambda point: point[1])
            lowest = min(lowest, best[1])
            colour = f"C{i}"
            axes.plot(*zip(*points, strict=True), color=colour, label=f"width {width}")
            axes.plot(*best, "o", color=colour)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="peak learning rate", title=rule, yscale="log")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="validation loss (nats)", ylim=(lowest * 0.9, 3))
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--smoke", action="store_true", help="two widths and a few steps")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stamp = environment("scales.py")
    task = Digits("digits, multilayer perceptron", 20 if arguments.smoke else 60, 0, 0.0, rates=0)
    widths, seeds = ((8, 16), (0,)) if arguments.smoke else (WIDTHS, SEEDS)
    loss = {
        rule: {
            width: {digits(lr): finite(value) for lr, value in line.items()}
            for width, line in sweep(task, rule, widths, seeds).items()
        }
        for rule in SCALES
    }
    record = {"environment": stamp, "steps": task.steps, "batch": task.batch, "seeds": seeds}
    text = json.dumps(record | {"loss": loss}, indent=1)
    (arguments.out / "scales.json").write_text(text + "\n")
    draw(arguments.out / "scales.png", json.loads(text))


if __name__ == "__main__":
    main()
