# SPDX-License-Identifier: Apache-2.0
"""The published optimizers, each a row of keyword values for `fmuon.muon`.

`fmuon.presets.jordan(lr, **over)` is `fmuon.muon` with that row; a keyword in `over` replaces the
row's value.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fmuon.auxiliary import adamw, nadamw
from fmuon.base import Matrix, Transformation
from fmuon.functional import muon
from fmuon.orthogonalize import NewtonSchulz


@dataclass(frozen=True)
class Preset:
    """A row: calling it makes the transformation."""

    source: str
    values: dict[str, Any]

    def __call__(self, lr: Any = None, **over: Any) -> Transformation:
        """`muon` with this row's values, those in `over` first."""
        return muon(**self.values | ({} if lr is None else {"lr": lr}) | over)


def _input_major(path: str, leaf: Tensor) -> Matrix | str:  # noqa: ARG001
    return Matrix(1, 0) if leaf.ndim == 2 else "auxiliary"


optax = Preset(
    source="optax.contrib.muon 0.2.8: kernels (in, out), every 2-D leaf a matrix",
    values={
        "momentum": 0.95,
        "orthogonalize": NewtonSchulz("jordan", dtype="float32", eps=1e-8, norm="add"),
        "scale": "original",
        "auxiliary": nadamw(eps=1e-8, weight_decay=0.0),
        "labels": _input_major,
    },
)
jordan = Preset(
    source="github.com/KellerJordan/Muon 857d1ad, SingleDeviceMuonWithAuxAdam",
    values={
        "lr": 0.02,
        "momentum": 0.95,
        "bias_correction": False,
        "orthogonalize": NewtonSchulz("jordan", dtype="bfloat16", eps=1e-7, norm="add"),
        "scale": "original",
        # Its Adam has a learning rate of its own, 3e-4.
        "auxiliary": adamw((0.9, 0.95), eps=1e-10, lr_scale=3e-4 / 0.02, weight_decay=0.0),
        "missing": "zero",
    },
)

PRESETS: dict[str, Preset] = {"optax": optax, "jordan": jordan}
