# SPDX-License-Identifier: Apache-2.0
"""AdamW, torch.optim.Muon and FMuon on several tasks, tuned alike.

    python examples/evidence/compare.py              every task, an hour on two CPU cores
    python examples/evidence/compare.py gpt-64       one task
    python examples/evidence/compare.py --smoke      tiny tasks

Every optimizer gets the same learning rates and weight decays, each with one seed that is not
reported and on held-out data that is not reported. Rates are added for all, by the same ratio, as
long as one of them is best at an end. The best setting of each then runs with three seeds, the
optimizers in turn step by step, so that what else the machine does slows them alike; the first seed
runs once more with the metrics of FMuon, which must not change a bit of it.

Muon trains the same matrices in both forms, but for convolutions, which torch.optim.Muon refuses;
AdamW trains the rest. Both scale an update to the size of one of AdamW. The schedule is that of
train_gpt.py. Writes TASK.json, which ../report.py draws and page.py makes tables of.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tasks import SMOKE, TASKS, Task, loss_and_accuracy
from torch import nn
from train_gpt import warmup_cosine

import fmuon
from fmuon.orthogonalize import multiplies_bfloat16

OPTIMIZERS = ("AdamW", "torch.optim.Muon", "FMuon")
BETAS = (0.9, 0.95)
TUNING_SEED = 100
SEEDS = (0, 1, 2)
METRICS = ("update_rms", "orthogonality")
METRICS_EVERY = 5


class Setting(NamedTuple):
    """What is tuned."""

    lr: float
    weight_decay: float


def make_optimizers(
    kind: str, model: nn.Module, labels: Mapping[str, Any] | None, setting: Setting, **options: Any
) -> list[torch.optim.Optimizer]:
    """One of `OPTIMIZERS`; torch.optim.Muon leaves what is no matrix to an AdamW."""
    lr, decay = setting
    named = dict(model.named_parameters())
    if kind == "AdamW":
        return [torch.optim.AdamW(named.values(), lr, BETAS, weight_decay=decay)]
    auxiliary = fmuon.adamw(betas=BETAS)
    optimizer = fmuon.FMuon(
        model, lr, weight_decay=decay, labels=labels, auxiliary=auxiliary, **options
    )
    if kind == "FMuon":
        return [optimizer]
    matrices = {id(p) for p in fmuon.parameter_lists(optimizer)["muon"] if p.ndim == 2}
    muon = [p for p in named.values() if id(p) in matrices]
    rest = [p for p in named.values() if id(p) not in matrices]
    return [
        torch.optim.Muon(muon, lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr, BETAS, weight_decay=decay),
    ]


@dataclass
class Run:
    """One optimizer on one task from one seed."""

    task: Task
    kind: str
    setting: Setting
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    training_loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation_loss: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = self.task.model().train()
        self.batches = self.task.training(self.seed)
        self.optimizers = make_optimizers(
            self.kind, self.model, self.task.labels(), self.setting, **self.options
        )
        steps = torch.arange(self.task.steps)
        factors = [*warmup_cosine(steps, self.task.steps).tolist(), 0.0]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, factors.__getitem__)
            for optimizer in self.optimizers
        ]

    def advance(self) -> None:
        """Make the next step."""
        step = len(self.training_loss)
        inputs, classes = self.batches[step]
        # Dropout is the same for every optimizer.
        torch.manual_seed(self.seed * self.task.steps + step)
        began = time.perf_counter()
        logits = self.task.logits(self.model, inputs).flatten(0, -2)
        loss = F.cross_entropy(logits, classes.flatten())
        loss.backward()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self.training_loss.append(loss.item())
        self.seconds.append(time.perf_counter() - began)

    def validate(self, part: str) -> float:
        """Loss on a part of what is held out; noted if it is the one to report."""
        loss, accuracy = loss_and_accuracy(self.task, self.model, self.task.held_out(part))
        if part == "reported":
            step = len(self.training_loss)
            self.validation_loss[step], self.accuracy[step] = loss, accuracy
        return loss

    def record(self) -> dict[str, Any]:
        """What was measured."""
        return {
            "seed": self.seed,
            "training_loss": [digits(x) for x in self.training_loss],
            "seconds": [digits(x, 4) for x in self.seconds],
            "validation_loss": {step: digits(x) for step, x in self.validation_loss.items()},
            "accuracy": {step: digits(x) for step, x in self.accuracy.items()},
        }


def digits(x: float, count: int = 6) -> float:
    """Rounded to so many digits."""
    return float(f"{x:.{count}g}")


def tune(task: Task) -> tuple[list[dict[str, Any]], dict[str, Setting]]:
    """The loss at every setting of the grid, and the best setting of each optimizer."""
    losses: dict[tuple[str, int, float], float] = {}
    first, last = 0, task.rates - 1
    while True:
        for kind, k, decay in product(OPTIMIZERS, range(first, last + 1), task.weight_decays):
            if (kind, k, decay) in losses:
                continue
            run = Run(task, kind, Setting(task.rate(k), decay), TUNING_SEED)
            for _ in range(task.steps):
                run.advance()
            losses[kind, k, decay] = loss = run.validate("tuning")
            print(f"{kind:16}  lr {task.rate(k):<8g}  decay {decay}  {loss:.4f}", flush=True)
        # A loss that is not a number is never the best.
        best = {
            kind: min((key for key in losses if key[0] == kind), key=lambda key: rank(losses[key]))
            for kind in OPTIMIZERS
        }
        at = {k for _, k, _ in best.values()}
        if first not in at and last not in at:
            break
        first, last = first - (first in at), last + (last in at)
    grid = [
        {"optimizer": kind, "lr": task.rate(k), "weight_decay": decay, "loss": finite(loss)}
        for (kind, k, decay), loss in sorted(losses.items())
    ]
    return grid, {kind: Setting(task.rate(k), decay) for kind, (_, k, decay) in best.items()}


def rank(loss: float) -> float:
    """The loss, infinite where it is none."""
    return loss if loss == loss else float("inf")


def finite(loss: float) -> float | None:
    """As JSON can say it."""
    return digits(loss) if abs(loss) < float("inf") else None


def compare(task: Task, best: Mapping[str, Setting]) -> dict[str, list[Run]]:
    """Three seeds of every optimizer, step by step in turn."""
    runs: dict[str, list[Run]] = {kind: [] for kind in OPTIMIZERS}
    for seed in SEEDS:
        racing = [Run(task, kind, best[kind], seed) for kind in OPTIMIZERS]
        for step in range(task.steps):
            turn = step % len(racing)
            for run in racing[turn:] + racing[:turn]:
                run.advance()
            if (step + 1) % task.validate_every == 0:
                for run in racing:
                    run.validate("reported")
        for run in racing:
            print(f"{run.kind:16}  seed {seed}  {run.validation_loss[task.steps]:.4f}", flush=True)
            runs[run.kind].append(run)
    return runs


def watch(plain: Run) -> dict[str, Any]:
    """The metrics of FMuon in the same run: steps, and for each metric the values of each leaf."""
    run = Run(plain.task, plain.kind, plain.setting, plain.seed, {"metrics": METRICS})
    (optimizer,) = run.optimizers
    steps: list[int] = []
    values: dict[str, dict[str, list[float]]] = {metric: {} for metric in METRICS}
    for step in range(1, run.task.steps + 1):
        run.advance()
        if step % METRICS_EVERY == 0 or step == 1:
            steps.append(step)
            for key, value in optimizer.metrics().items():
                _, metric, leaf = key.split("/")
                values[metric].setdefault(leaf, []).append(digits(value, 4))
    assert run.training_loss == plain.training_loss
    return {"steps": steps} | values


def environment(command: str) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "command": f"python examples/evidence/{command}",
        "fmuon": fmuon.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "native_bfloat16": multiplies_bfloat16(torch.device("cpu")),
    }


def cpu() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--smoke", action="store_true", help="tiny tasks and a few steps")
    arguments = parser.parse_args()
    # Otherwise the gradient of an embedding is summed in the order in which threads finish.
    torch.use_deterministic_algorithms(True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tasks = SMOKE if arguments.smoke else TASKS
    for name in arguments.tasks or tasks:
        task = tasks[name]
        print(f"{name}: {task.title}, {task.steps} steps")
        stamp = environment(f"compare.py {name}")
        grid, best = tune(task)
        runs = compare(task, best)
        results = {
            "title": task.title,
            "task": task.settings(),
            "betas": BETAS,
            "tuning_seed": TUNING_SEED,
            "seeds": SEEDS,
            "grid": grid,
            "best": {kind: setting._asdict() for kind, setting in best.items()},
            "curves": {kind: [run.record() for run in runs[kind]] for kind in OPTIMIZERS},
            "metrics": watch(runs["FMuon"][0]),
        }
        text = json.dumps({"environment": stamp} | results, separators=(",", ":"))
        # A line for every key of the record and of its lists.
        (arguments.out / f"{name}.json").write_text(text.replace(',"', ',\n"') + "\n")


if __name__ == "__main__":
    main()
