# SPDX-License-Identifier: Apache-2.0
"""Forward, backward and update in one compiled graph; stopped, saved and resumed.

    python examples/02_functional.py
    python examples/02_functional.py --smoke    a smaller model and fewer steps

The train step is a pure function of the parameters, the optimizer's state, the number of the step
and the batch. So the first three are a whole checkpoint, and a resumed run has the same bits as one
that was not interrupted.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fmuon


def make_model(width: int) -> nn.Module:
    """A model to fit; it is only read, its parameters are passed to it in each call."""
    return nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)
    )


def draw(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step. It depends on nothing else, so there is no loader to save."""
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x[:, :8] + x[:, 8:16] * x[:, 16:24])


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the checkpoint")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.out / "02_functional.pt"
    width, steps = (32, 40) if arguments.smoke else (256, 1000)
    torch.manual_seed(0)
    model = make_model(width)

    def rate(step: Tensor) -> Tensor:
        # A schedule is a function of the step, traced with the rest of the graph.
        return 1e-2 * 0.5 * (1 + torch.cos(math.pi * step / steps))

    labels = fmuon.label(model) | {"4.weight": "auxiliary"}  # the output layer
    opt = fmuon.muon(lr=rate, weight_decay=0.01, labels=labels)

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(model, params, (x,)) - y).square().mean()

    def train_step(
        params: dict[str, Tensor], state: dict[str, Any], step: Tensor, x: Tensor, y: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
        updates, state = opt.update(grads, state, step, params)
        return fmuon.apply_updates(params, updates), state, loss

    # The number `step` becomes a tensor outside of the graph: one graph serves every step.
    compiled = fmuon.compile(train_step, mode="default")

    params = {name: p.detach() for name, p in model.named_parameters()}
    state = opt.init(params)
    began = time.perf_counter()
    compiled(params, state, 0, *draw(0))  # a step is pure: nothing has changed
    print(f"compiled in {time.perf_counter() - began:.1f} s")

    losses: list[float] = []
    began = time.perf_counter()
    for step in range(steps):
        if step == steps // 2:
            torch.save({"params": params, "state": state, "step": step}, checkpoint)
        params, state, loss = compiled(params, state, step, *draw(step))
        losses.append(loss.item())
    print(f"{(time.perf_counter() - began) / steps * 1e3:.2f} ms per step")
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")

    saved = torch.load(checkpoint, weights_only=True)
    again, state = saved["params"], saved["state"]
    for step in range(saved["step"], steps):
        again, state, _ = compiled(again, state, step, *draw(step))
    difference = max((again[name] - params[name]).abs().max().item() for name in params)
    print(f"resumed after {saved['step']} steps: largest difference {difference}")


if __name__ == "__main__":
    main()
