# SPDX-License-Identifier: Apache-2.0
"""FMuon in an ordinary training loop, beside AdamW in the same loop.

    python examples/01_drop_in.py
    python examples/01_drop_in.py --smoke    a few steps

A small network guesses the next byte of Python's standard library from the 16 bytes before it. Both
optimizers start from the same weights, see the same batches and try the same learning rates.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fmuon

CONTEXT = 16


class Model(nn.Module):
    """16 bytes -> logits of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.first = nn.Linear(CONTEXT * 32, 256)
        self.second = nn.Linear(256, 256)
        self.head = nn.Linear(256, 256)

    def forward(self, window: Tensor) -> Tensor:
        """(batch, 16) -> (batch, 256)."""
        x = F.relu(self.first(self.embed(window).flatten(1)))
        return self.head(F.relu(x + self.second(x)))


def draw(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows at random places, and the bytes that follow them."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, -1]


def train(kind: str, lr: float, text: Tensor, steps: int) -> tuple[float, float]:
    """The loss before the first step and after the last, on bytes that are not trained on."""
    torch.manual_seed(0)
    model = Model()
    if kind == "FMuon":
        # The model and not its parameters: then embeddings and heads are told from other matrices.
        optimizer = fmuon.FMuon(model, lr=lr, weight_decay=0.01)
        # The step of a matrix doesn't depend on the size of its gradient; only the rest needs this.
        clipped = fmuon.parameter_lists(optimizer)["auxiliary"]
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        clipped = list(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    training, validation = text.tensor_split([len(text) * 9 // 10])
    inputs, targets = draw(validation, 2048, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = F.cross_entropy(model(inputs), targets).item()
    for _ in range(steps):
        x, y = draw(training, 256, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(clipped, 1.0)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return before, F.cross_entropy(model(inputs), targets).item()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    smoke = parser.parse_args().smoke
    steps, rates = (30, (4e-3,)) if smoke else (500, (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    source = bytearray(b"".join(file.read_bytes() for file in files))
    text = torch.frombuffer(source, dtype=torch.uint8)
    print(fmuon.explain(Model()), "\n")
    print(f"loss in nats per byte after {steps} steps, before the first -> after the last")
    for lr in rates:
        for kind in ("AdamW", "FMuon"):
            before, after = train(kind, lr, text, steps)
            print(f"lr {lr:<6g}  {kind}  {before:.3f} -> {after:.3f}", flush=True)


if __name__ == "__main__":
    main()
