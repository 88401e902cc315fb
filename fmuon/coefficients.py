# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz polynomials exactly as published, each with its birth certificate.

One step maps every singular value s of a matrix to a s + b s^3 + c s^5. A set is one object:
its triples, the safety factors that keep it from diverging under rounding and the number of steps
it was made for belong together, since another count or a plain norm can make a good set diverge.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

from fmuon.base import ConfigurationError, is_number, lookup

Triple: TypeAlias = tuple[float, float, float]

_MOST_STEPS = 1000


@dataclass(frozen=True)
class CoefficientSet:
    """Polynomials (a, b, c), one per step, and how they may be used.

    Attributes:
        published: the triples as printed in the source.
        source: paper or page, with equation or table.
        tail: what follows the last published triple: "none" (the set is complete), or "repeat".
        minimum: fewest steps the set converges in as intended.
        safety: every polynomial but the last is evaluated at s / safety, so that rounding can't
            push a value past the end of the interval on which the next one is bounded.
        norm_safety: the norm is multiplied by it before the first step, for the same reason.
    """

    published: tuple[Triple, ...]
    source: str
    tail: str = "none"
    minimum: int = 0
    safety: float = 1.0
    norm_safety: float = 1.0

    def __post_init__(self) -> None:
        # Lists are accepted and stored as tuples: a set must be hashable.
        if isinstance(self.published, list):
            rows = (tuple(row) if isinstance(row, list) else row for row in self.published)
            object.__setattr__(self, "published", tuple(rows))
        rows = self.published if isinstance(self.published, tuple) else ()  # pyright: ignore
        triples = [row for row in rows if isinstance(row, tuple) and len(row) == 3]  # pyright: ignore
        if (
            not rows
            or len(triples) < len(rows)
            or not all(is_number(x) for t in triples for x in t)
        ):
            raise ConfigurationError(
                f"CoefficientSet: published={self.published!r}; give one triple (a, b, c) of "
                f"numbers per step, one at least"
            )
        if not isinstance(self.source, str):  # pyright: ignore
            raise ConfigurationError(f"CoefficientSet: source={self.source!r}; give a text")
        if self.tail not in ("none", "repeat"):
            raise ConfigurationError(f"CoefficientSet: tail={self.tail!r}; known: 'none', 'repeat'")
        if not (is_number(self.minimum, whole=True) and self.minimum >= 0):
            raise ConfigurationError(
                f"CoefficientSet: minimum={self.minimum!r}; give an int that is not negative"
            )
        for name in ("safety", "norm_safety"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < math.inf):
                raise ConfigurationError(
                    f"CoefficientSet: {name}={value!r}; give a positive number"
                )

    @property
    def default_steps(self) -> int:
        """The number of steps the set was made for."""
        return self.minimum or len(self.published)

    def polynomials(self, steps: int | None = None) -> tuple[Triple, ...]:
        """The triples to apply, in order, with the safety factor folded in.

        Dividing the argument by f turns (a, b, c) into (a / f, b / f^3, c / f^5).
        """
        steps = self.default_steps if steps is None else steps
        if not is_number(steps, whole=True) or steps >= _MOST_STEPS:
            raise ConfigurationError(f"steps={steps!r}: give an int below {_MOST_STEPS}")
        if steps < 1:
            raise ConfigurationError(f"steps={steps}: at least one Newton-Schulz step is needed")
        if self.tail == "none" and steps != self.default_steps:
            raise ConfigurationError(
                f"steps={steps}: this coefficient set is made for exactly {self.default_steps} "
                f"steps ({self.source}); leave steps=None or choose a set that can be extended"
            )
        if self.tail == "repeat" and len(self.published) > 1 and steps < self.default_steps:
            raise ConfigurationError(
                f"steps={steps}: this coefficient set needs at least {self.default_steps} steps "
                f"({self.source}); leave steps=None for {self.default_steps}"
            )
        rows = (self.published + self.published[-1:] * steps)[:steps]
        f = self.safety
        return tuple((a / f, b / f**3, c / f**5) for a, b, c in rows[:-1]) + rows[-1:]

    def response(self, s: float, steps: int | None = None) -> float:
        """What the polynomials make of one singular value (after the norm's safety factor)."""
        s = s / self.norm_safety
        for a, b, c in self.polynomials(steps):
            s = s * (a + b * s**2 + c * s**4)
        return s


COEFFICIENTS: dict[str, CoefficientSet] = {
    "jordan": CoefficientSet(
        published=((3.4445, -4.7750, 2.0315),),
        source="Jordan 2024, kellerjordan.github.io/posts/muon, 'Tuning the coefficients'",
        tail="repeat",
        minimum=5,
    ),
    "you": CoefficientSet(
        published=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        source="You Jiacheng 2025, in leloykun.github.io/ponder/muon-opt-coeffs",
    ),
    "polar_express": CoefficientSet(
        published=(
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
            (1.875, -1.25, 0.375),
        ),
        source="Amsel et al. 2025, arXiv 2505.16932, Algorithm 1",
        tail="repeat",
        minimum=5,
        safety=1.01,
        norm_safety=1.01,
    ),
    "polar_express_nanogpt": CoefficientSet(
        published=(
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        # The safety factor 1.02 is inside the triples.
        source="KellerJordan/modded-nanogpt f411b3d (2025): arXiv 2505.16932, Algorithm 1, with "
        "l = 1e-3, cushion 2 and safety factor 1.02",
        norm_safety=1.02,
    ),
    "cans": CoefficientSet(
        published=(
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        source="Grishina, Smirnov and Rakhuba 2025, arXiv 2506.10935, Algorithm 1 (degree 5)",
        safety=1.01,
        norm_safety=1.01,
    ),
}


def coefficient_set(name: str | CoefficientSet) -> CoefficientSet:
    """The set of that name; a `CoefficientSet` of one's own passes through."""
    return name if isinstance(name, CoefficientSet) else lookup(COEFFICIENTS, name, "coefficients")
