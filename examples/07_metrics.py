# SPDX-License-Identifier: Apache-2.0
"""What every step did: update sizes and orthogonality, in TensorBoard and in a picture.

    python examples/07_metrics.py
    python examples/07_metrics.py --smoke    fewer steps
    tensorboard --logdir out/07_metrics      if tensorboard is installed

In the middle of the run a batch holds a NaN. With `nonfinite="skip"` that step changes nothing, and
the metric "skipped_steps" tells that it was one.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import fmuon

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

METRICS = ("update_rms", "orthogonality", "update_ratio", "lr", "skipped_steps")


class Model(nn.Module):
    """32 numbers -> 4, by layers whose names are read in TensorBoard."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128)
        self.second = nn.Linear(128, 128)
        self.head = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 32) -> (batch, 4)."""
        return self.head(F.gelu(self.second(F.gelu(self.first(x)))))


def draw(path: Path, history: list[dict[str, float]], skipped: int) -> None:
    """Update RMS and orthogonality against the step, a line for each parameter."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, metric in ((upper, "update_rms"), (lower, "orthogonality")):
        keys = [key for key in history[0] if key.startswith(f"fmuon/{metric}/")]
        for key in keys:
            # Only matrices have an orthogonality.
            name = key.removeprefix(f"fmuon/{metric}/")
            style = "-" if f"fmuon/orthogonality/{name}" in history[0] else ":"
            axes.plot([values[key] for values in history], style, label=name)
        axes.axvline(skipped, color="grey", linestyle="--", linewidth=1)
        axes.grid(alpha=0.3)
    upper.set(
        yscale="log", ylabel="RMS of the update", title="Updates: by Muon solid, by AdamW dotted"
    )
    upper.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    lower.set(ylim=0, xlabel="step", ylabel="RMS of s² - 1")
    lower.set_title("Orthogonality: how far the singular values s of the factor are from 1")
    lower.annotate(" a NaN, skipped", (skipped, 0.02), color="grey")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="fewer steps")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of what is written")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    steps = 40 if arguments.smoke else 400
    torch.manual_seed(0)
    model = Model()
    optimizer = fmuon.FMuon(model, lr=1e-2, metrics=METRICS, nonfinite="skip")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-3)
    writer = None if SummaryWriter is None else SummaryWriter(arguments.out / "07_metrics")

    history: list[dict[str, float]] = []
    losses: list[float] = []
    for step in range(steps):
        x = torch.randn(256, 32)
        y = torch.sin(x[:, :4] + x[:, 4:8] * x[:, 8:12])
        if step == steps // 2:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        # One transfer from the device: where that counts, ask every 100 steps.
        history.append(optimizer.metrics())
        if writer is not None:
            writer.add_scalar("loss", loss, step)
            for key, value in history[-1].items():
                writer.add_scalar(key, value, step)
    if writer is None:
        print("tensorboard is not installed: only the picture is made")
    else:
        writer.close()

    draw(arguments.out / "07_metrics.png", history, steps // 2)
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}, at the NaN {losses[steps // 2]}")
    print(f"skipped_steps {history[-1]['fmuon/skipped_steps']:.0f}")
    for key, value in history[-1].items():
        print(f"{key:34} {value:.4g}")


if __name__ == "__main__":
    main()
