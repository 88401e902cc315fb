# SPDX-License-Identifier: Apache-2.0
"""Before anything is timed: do all act on the same gradients, and do the same steps agree?

Three steps on three sets of gradients are compared with a literal loop in float64; the first, which
starts from zero momentum, also with the exact polar factors of its gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from harness import Row
from inventories import Shape
from peers import LR, MOMENTUM, TRIPLE, Running, Subject
from torch import Tensor, nn

STEPS = 3
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
"""Largest |W - R| / |R - W0|, R the reference: rounding, amplified by five steps of slope 3.4."""


@dataclass(frozen=True)
class Reference:
    """What every subject starts from and is compared with, per matrix [rows, columns]."""

    initial: list[Tensor]
    gradients: list[list[Tensor]]
    polar: list[Tensor]
    final: list[Tensor]


def reference(shapes: Sequence[Shape], seed: int = 0) -> Reference:
    """Gaussian weights and gradients, the polar factors and the weights after three steps."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    initial, gradients = draw(), [draw() for _ in range(STEPS)]
    final = [_muon(w, series) for w, *series in zip(initial, *gradients, strict=True)]
    return Reference(initial, gradients, [_polar(g) for g in gradients[0]], final)


def check(
    subject: Subject, truth: Reference, device: str = "cpu"
) -> tuple[Running, list[nn.Parameter], Row]:
    """The subject at work after three checked steps, its parameters, and how good the steps were.

    Raises:
        AssertionError: a subject that claims the same mathematics has other weights.
    """
    params = [nn.Parameter(w.to(device, copy=True)) for w in truth.initial]
    running = subject.build(params)
    for step, gradients in enumerate(truth.gradients):
        give(params, gradients)
        assert all(torch.equal(p.grad.cpu(), g) for p, g in zip(params, gradients, strict=True))
        running.step()
        if step == 0:
            quality = _cosines(running.weights(), truth)
    error = _error(running.weights(), truth)
    row: Row = {
        "cosine_mean": sum(quality) / len(quality),
        "cosine_worst": min(quality),
        "error": error,
    }
    if subject.same:
        tolerance = TOLERANCES[subject.products]
        assert error < tolerance, f"weights are off by {error:.1e}; allowed {tolerance}"
    return running, params, row


def give(params: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Fresh copies of the gradients, of the dtype and on the device of the parameters.

    Some optimizers write over those that they get.
    """
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.to(p, copy=True)


def _muon(w: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Weights after steps on these gradients, in float64. [Jordan 2024]"""
    w, momentum = w.double(), torch.zeros_like(w, dtype=torch.float64)
    a, b, c = TRIPLE
    for g in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * g
        x = MOMENTUM * momentum + (1 - MOMENTUM) * g
        x = x / x.norm()
        x = x.T if w.shape[0] > w.shape[1] else x
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if w.shape[0] > w.shape[1] else x
        w = w - LR * max(1.0, w.shape[0] / w.shape[1]) ** 0.5 * x
    return w


def _polar(g: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(g.double(), full_matrices=False)
    return u @ vh


def _cosines(weights: Sequence[Tensor], truth: Reference) -> list[float]:
    """Per matrix: of what was subtracted from the weights, with the polar factor."""
    pairs = zip(truth.initial, weights, truth.polar, strict=True)
    return [
        torch.cosine_similarity(
            (w0.double() - w.detach().cpu()).flatten(), o.flatten(), dim=0
        ).item()
        for w0, w, o in pairs
    ]


def _error(weights: Sequence[Tensor], truth: Reference) -> float:
    """|W - R| / |R - W0|, the largest of all matrices."""
    triples = zip(truth.initial, weights, truth.final, strict=True)
    return max(((w.detach().cpu() - r).norm() / (r - w0).norm()).item() for w0, w, r in triples)
