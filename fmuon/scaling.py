# SPDX-License-Identifier: Apache-2.0
"""Matrix shape -> multiplier of the orthogonal factor.

Every rule takes (fan_out, fan_in), the rows and columns of the matrix view. The semi-orthogonal
factor of an m x n matrix has a root mean square (RMS) entry of 1 / sqrt(max(m, n)).
"""

import math
from collections.abc import Callable
from typing import TypeAlias

from fmuon.base import ConfigurationError, lookup

ScaleRule: TypeAlias = Callable[[int, int], float]


def original(fan_out: int, fan_in: int) -> float:
    """sqrt(max(1, fan_out / fan_in)).

    [Jordan 2024, github.com/KellerJordan/Muon, muon.py]
    """
    return math.sqrt(max(1.0, fan_out / fan_in))


def match_rms_adamw(fan_out: int, fan_in: int) -> float:
    """0.2 sqrt(max(fan_out, fan_in)): an update RMS of 0.2.

    [Liu et al. 2025, arXiv 2502.16982, eq. 4]

    A typical AdamW update has an RMS of 0.2 to 0.4: a learning rate tuned for AdamW carries over.
    """
    return 0.2 * math.sqrt(max(fan_out, fan_in))


def spectral(fan_out: int, fan_in: int) -> float:
    """sqrt(fan_out / fan_in): an update of spectral norm lr between RMS norms.

    [Bernstein 2025, jeremybernste.in/writing/deriving-muon]
    """
    return math.sqrt(fan_out / fan_in)


def none(fan_out: int, fan_in: int) -> float:  # noqa: ARG001
    """1: an update of spectral norm lr."""
    return 1.0


SCALES: dict[str, ScaleRule] = {
    "original": original,
    "match_rms_adamw": match_rms_adamw,
    "spectral": spectral,
    "none": none,
}


def scale_rule(rule: str | ScaleRule) -> ScaleRule:
    """The rule of that name; a callable (fan_out, fan_in) -> float passes through."""
    if isinstance(rule, str):
        return lookup(SCALES, rule, "scale")
    if not callable(rule):
        raise ConfigurationError(
            f"scale={rule!r}: give a callable (fan_out, fan_in) -> float, or one of "
            f"{', '.join(map(repr, SCALES))}"
        )
    return rule
