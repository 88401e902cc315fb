# SPDX-License-Identifier: Apache-2.0
"""An update is a function, so what comes before and after it is ordinary code: no chain is needed.

    python examples/08_composition.py
    python examples/08_composition.py --smoke    fewer steps, no code written for the graph

A symbol is to be recalled from earlier in a sequence by one layer of attention. One compiled graph
holds all of a step: gradients of two halves of a batch, accumulated; clipping by their norm; Muon;
a trust ratio on the updates; the new params; a clip of attention logits; an average of the params.
Then eight members train as one by `vmap`, and a learning rate is learned through an update.
"""

import argparse
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

import fmuon

Params: TypeAlias = dict[str, Tensor]
HEADS, WIDTH, LENGTH, SYMBOLS = 4, 32, 16, 8
LAYERS = {"attn": fmuon.Attention(HEADS, query="q", key="k")}
LABELS = {"re:symbols|positions|head": "auxiliary"}
TAU = 4.0  # 100 in large models; low enough here to be seen at work


def make_params(generator: torch.Generator) -> Params:
    """Weights (out, in) of one layer; rows of symbols and positions."""
    shapes = {
        "symbols": (2 * SYMBOLS, WIDTH),
        "positions": (LENGTH, WIDTH),
        "head": (SYMBOLS, WIDTH),
    }
    shapes |= dict.fromkeys("qkvo", (WIDTH, WIDTH))
    return {name: torch.randn(s, generator=generator) / s[1] ** 0.5 for name, s in shapes.items()}


def draw(step: int, batch: int) -> tuple[Tensor, Tensor]:
    """Symbols 0 to 7 in a row, the last one asking for the symbol at the place that it names."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(SYMBOLS, (batch, LENGTH), generator=generator)
    answer = x.gather(1, x[:, -1:])[:, 0]
    return torch.cat([x[:, :-1], x[:, -1:] + SYMBOLS], 1), answer


def loss_of(params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, largest attention logit of each head)"""
    h = params["symbols"][x] + params["positions"]
    q, k, v = ((h @ params[name].mT).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for name in "qkv")
    logits = q[..., -1:, :] @ k.mT / (WIDTH // HEADS) ** 0.5
    mixed = (logits.softmax(-1) @ v).transpose(-2, -3).flatten(-2)[..., 0, :]
    out = (h[..., -1, :] + mixed @ params["o"].mT) @ params["head"].mT
    return F.cross_entropy(out, y), logits.detach().amax((0, 2, 3))


# ---- before the update ---------------------------------------------------------------------------


def accumulated(params: Params, x: Tensor, y: Tensor, parts: int) -> tuple[Params, Tensor, Tensor]:
    """Gradients of equal parts of a batch, one after the other: mean, mean loss, largest logits."""
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    losses: list[Tensor] = []
    peaks: list[Tensor] = []
    for own_x, own_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        grads, (loss, peak) = torch.func.grad_and_value(loss_of, has_aux=True)(params, own_x, own_y)
        total = {name: total[name] + g / parts for name, g in grads.items()}
        losses.append(loss)
        peaks.append(peak)
    return total, torch.stack(losses).mean(), torch.stack(peaks).amax(0)


# ---- after the update ----------------------------------------------------------------------------


def trusted(updates: Params, params: Params, most: float = 0.1) -> Params:
    """Updates of no more than that part of the norm of their weight."""
    return {
        name: u * (most * params[name].norm() / u.norm().clamp(min=1e-12)).clamp(max=1.0)
        for name, u in updates.items()
    }


def averaged(average: Params, params: Params, decay: float = 0.9) -> Params:
    """Exponential moving average of the params."""
    return {name: torch.lerp(p, average[name], decay) for name, p in params.items()}


# ---- the three parts -----------------------------------------------------------------------------


def train(steps: int, backend: str) -> None:
    """Everything in one graph."""
    opt = fmuon.muon(weight_decay=0.01, labels=LABELS)

    def train_step(
        params: Params, average: Params, state: Any, step: Tensor, lr: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Params, Params, Any, Tensor, Tensor, Tensor]:
        grads, loss, peak = accumulated(params, x, y, parts=2)
        grads, norm = fmuon.clip_by_global_norm(grads, 1.0)
        updates, state = opt.update(grads, state, step, params, lr=lr)
        params = fmuon.apply_updates(params, trusted(updates, params))
        params = fmuon.qk_clip(params, {"attn": peak}, TAU, layers=LAYERS)
        return params, averaged(average, params), state, loss, norm, peak

    compiled = fmuon.compile(train_step, mode="default", backend=backend)
    params = average = make_params(torch.Generator().manual_seed(0))
    state = opt.init(params)
    clipped = 0
    for step in range(steps):
        lr = 0.05 * (1 - step / steps)
        params, average, state, loss, norm, peak = compiled(
            params, average, state, step, lr, *draw(step, 128)
        )
        clipped += int((peak > TAU).sum())
        if step in (0, steps - 1):
            print(f"step {step:4}  loss {loss:.4f}  gradient {norm:.3f}  logits {peak.max():.2f}")
    held_out = draw(10**6, 1024)
    last, mean = (loss_of(p, *held_out)[0] for p in (params, average))
    print(f"heads clipped {clipped} times; held out: last {last:.4f}, averaged {mean:.4f}")


def train_ensemble(steps: int, members: int = 8) -> None:
    """Members with other weights and one batch, all in one call of everything."""
    opt = fmuon.muon(0.03, labels=LABELS)
    generator = torch.Generator().manual_seed(1)
    models = [make_params(generator) for _ in range(members)]
    params = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    state = torch.func.vmap(opt.init)(params)

    def member_step(
        params: Params, state: Any, step: int, x: Tensor, y: Tensor
    ) -> tuple[Params, Any, Tensor]:
        grads, (loss, _) = torch.func.grad_and_value(loss_of, has_aux=True)(params, x, y)
        updates, state = opt.update(grads, state, step, params)
        return fmuon.apply_updates(params, updates), state, loss

    together = torch.func.vmap(member_step, in_dims=(0, 0, None, None, None))
    for step in range(steps):
        x, y = draw(step, 64)
        params, state, losses = together(params, state, step, x, y)
    print("ensemble:", " ".join(f"{loss:.3f}" for loss in losses))


def learn_a_rate(steps: int) -> None:
    """The gradient of the loss after one update with respect to its learning rate."""
    opt = fmuon.muon(labels=LABELS, differentiable=True)
    params = make_params(torch.Generator().manual_seed(2))
    state, x, y = opt.init(params), *draw(0, 128)
    grads = torch.func.grad(lambda p: loss_of(p, x, y)[0])(params)

    def loss_after(lr: Tensor) -> Tensor:
        updates, _ = opt.update(grads, state, 0, params, lr=lr)
        return loss_of(fmuon.apply_updates(params, updates), x, y)[0]

    lr = torch.tensor(1e-3)
    first = loss_after(lr)
    for _ in range(steps):
        lr = lr - 4e-3 * torch.func.grad(loss_after)(lr)
    print(
        f"learned rate: 0.0010 -> {lr:.4f}, "
        f"loss after its step: {first:.4f} -> {loss_after(lr):.4f}"
    )


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    steps = 60 if arguments.smoke else 300
    # "aot_eager" traces the same graph, and writes no code for it.
    train(steps, "aot_eager" if arguments.smoke else "inductor")
    train_ensemble(steps // 2)
    learn_a_rate(20)


if __name__ == "__main__":
    main()
