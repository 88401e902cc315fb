# SPDX-License-Identifier: Apache-2.0
"""Stop a run, go on from the file, and end where an uninterrupted run ends.

    python examples/06_checkpoint_and_resume.py
    python examples/06_checkpoint_and_resume.py --smoke    fewer steps

What a checkpoint needs: the model, the optimizer (its learning rates and buffers), the scheduler,
the step, and the random numbers, which draw batches and dropout here. The file holds tensors and
plain data, so `weights_only=True` reads it.
"""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fmuon


class Model(nn.Module):
    """A small network that lists its layers in a given order."""

    def __init__(self, order: Iterable[str] = ("enter", "middle", "leave")) -> None:
        super().__init__()
        sizes = {"enter": (16, 64), "middle": (64, 64), "leave": (64, 4)}
        self.layers = nn.ModuleDict({name: nn.Linear(*sizes[name]) for name in order})
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) -> (batch, 4)."""
        x = torch.relu(self.layers["enter"](x))
        return self.layers["leave"](self.dropout(torch.relu(self.layers["middle"](x))))


class Run:
    """Everything that training changes."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model, self.step = model, 0
        self.optimizer = fmuon.FMuon(model, lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def train(self, until: int) -> None:
        """Go on until so many steps are made."""
        while self.step < until:
            x = torch.randn(64, 16)
            self.optimizer.zero_grad()
            (self.model(x) - x[:, :4] * x[:, 4:8]).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1

    def save(self, path: Path) -> None:
        """Write a checkpoint, or, if this is interrupted, leave the last one as it is."""
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(
                {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(),
                    "step": self.step,
                    "random": torch.get_rng_state(),
                },
                file,
            )
            # On the disk before the name points to it.
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        """Go back to where a checkpoint was written."""
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.step = saved["step"]
        torch.set_rng_state(saved["random"])


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest between two models, parameter by parameter."""
    named = dict(other.named_parameters())
    return max((p - named[name]).abs().max().item() for name, p in one.named_parameters())


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="fewer steps")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the checkpoint")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, steps = arguments.out / "06_checkpoint.pt", 20 if arguments.smoke else 200

    torch.manual_seed(0)
    straight = Run(Model(), steps)
    straight.train(until=steps // 2)
    straight.save(path)
    straight.train(until=steps)
    print(f"saved after {steps // 2} of {steps} steps: {path}")

    resumed = Run(Model(), steps)
    resumed.load(path)
    resumed.train(until=steps)
    print(f"resumed: largest difference {difference(resumed.model, straight.model)}")

    # Both have names, so a parameter finds its own buffers wherever it stands.
    reordered = Run(Model(order=("leave", "enter", "middle")), steps)
    reordered.load(path)
    reordered.train(until=steps)
    print(f"in another order: largest difference {difference(reordered.model, straight.model)}")

    # What it costs to save the model alone.
    fresh = Run(Model(), steps)
    fresh.load(path)
    fresh.optimizer.state.clear()
    fresh.train(until=steps)
    print(f"without its buffers: largest difference {difference(fresh.model, straight.model):.2g}")


if __name__ == "__main__":
    main()
