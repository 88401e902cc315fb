# SPDX-License-Identifier: Apache-2.0
"""What an update did, leaf by leaf, as 0-d tensors for a logger.

A metric is a row of `METRICS`. It is computed only where `fmuon.muon(metrics=...)` asks for it, and
stored in `state["metrics"]` under `metric_key(name, path)`. A leaf that sits a step out keeps its
values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmuon.base import Stack

SKIPPED = "skipped_steps"
"""The one metric that is not of a leaf."""


@dataclass(frozen=True)
class Metric:
    """How one number per leaf is computed.

    Attributes:
        source: what from: "leaf" (update, weight), "stack" (orthogonal factors [k, m, n], to k
            values of which a leaf gets the mean over its matrices), "rate" (what multiplies the
            direction of the step), or "step" (the number so far, whether the step was finite).
        compute: the function.
        needs_params: whether it reads the weight.
    """

    source: str
    compute: Callable[..., Tensor]
    needs_params: bool = False


def _rms(update: Tensor, _: Any) -> Tensor:
    return torch.linalg.vector_norm(update) / math.sqrt(max(1, update.numel()))


def _ratio(update: Tensor, weight: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(weight, dtype=update.dtype)
    return torch.where(norm > 0, torch.linalg.vector_norm(update) / norm, 0)


def _orthogonality(factors: Stack) -> Tensor:
    side = factors.shape[-2]
    gram = factors @ factors.mT - torch.eye(side, dtype=factors.dtype, device=factors.device)
    return torch.linalg.matrix_norm(gram) / math.sqrt(side)


def _rate(rate: Tensor) -> Tensor:
    return rate


def _skipped(count: Tensor, finite: Tensor) -> Tensor:
    return count + finite.logical_not()


METRICS: dict[str, Metric] = {
    # Root mean square of what is added to the leaf.
    "update_rms": Metric("leaf", _rms),
    # Its norm over that of the weights.
    "update_ratio": Metric("leaf", _ratio, needs_params=True),
    # Root mean square of s^2 - 1 over the singular values s of the factor.
    "orthogonality": Metric("stack", _orthogonality),
    # Learning rate times lr_scale, or times the shape scale.
    "lr": Metric("rate", _rate),
    # How many steps were left out since they weren't finite.
    SKIPPED: Metric("step", _skipped),
}


def metric_key(name: str, path: str | None = None) -> str:
    """Where a metric stands in `state["metrics"]`."""
    return f"fmuon/{name}" if path is None else f"fmuon/{name}/{path}"
