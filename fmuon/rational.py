# SPDX-License-Identifier: Apache-2.0
"""Best odd rational approximations of the sign function, computed in double precision; no torch.

On [lower, 1], and by oddness on [-1, -lower],

    f(x) = linear x + cubic x^3 + sum_j residues_j x / (x^2 + shifts_j)

is as near to 1 as such a function can be. Without the cubic term it has a closed form by Zolotarev;
with it the form is the start of a Remez exchange.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fmuon.base import ConfigurationError

# Points per interval on which extrema are looked for, evenly spaced in log x.
_GRID = 4000


@dataclass(frozen=True)
class Rational:
    """f as above; `error` is the largest |f - 1| on [lower, 1]."""

    lower: float
    linear: float
    cubic: float
    residues: tuple[float, ...]
    shifts: tuple[float, ...]
    error: float

    def __call__(self, x: float) -> float:
        """f(x)."""
        terms = (a / (x * x + c) for a, c in zip(self.residues, self.shifts, strict=True))
        return x * (self.linear + self.cubic * x * x + sum(terms))


@functools.cache
def zolotarev(poles: int, lower: float) -> Rational:
    """The best function without a cubic term.

    With r poles, l' = (1 - l^2)^(1/2) and K' the complete elliptic integral of modulus l',

        c_i = l^2 sn^2(i K' / (2r + 1); l') / cn^2(i K' / (2r + 1); l'),  i = 1 ... 2r
        a_j = -prod_k (c_2j-1 - c_2k) / prod_k!=j (c_2j-1 - c_2k-1)

    and f is M x (1 + sum_j a_j / (x^2 + c_2j-1)), with M such that it differs from 1 by as much
    upwards as downwards [Nakatsukasa and Freund 2016, SIAM Review 58(3), eqs. 3.4 to 3.8].
    """
    tangents = _tangents(lower, [i / (2 * poles + 1) for i in range(1, 2 * poles + 1)])
    places = [(lower * tangent) ** 2 for tangent in tangents]
    shifts, zeros = places[0::2], places[1::2]
    residues = [
        -math.prod(c - z for z in zeros) / math.prod(c - other for other in shifts if other != c)
        for c in shifts
    ]
    unscaled = Rational(lower, 1.0, 0.0, tuple(residues), tuple(shifts), 0.0)
    values = [unscaled(x) for x in _extrema(unscaled)]
    factor = 2 / (min(values) + max(values))
    return Rational(
        lower,
        factor,
        0.0,
        tuple(factor * a for a in residues),
        tuple(shifts),
        factor * max(values) - 1,
    )


def _tangents(complement: float, places: Sequence[float]) -> list[float]:
    """sn / cn at multiples of the complete integral K, for the modulus (1 - complement^2)^(1/2).

    By arithmetic-geometric means [Abramowitz and Stegun 1964, 16.4].
    """
    means, halves = [1.0], [math.sqrt(1 - complement**2)]
    geometric = complement
    while halves[-1] > 1e-15 * means[-1]:
        mean = means[-1]
        means.append((mean + geometric) / 2)
        halves.append((mean - geometric) / 2)
        geometric = math.sqrt(mean * geometric)
    found: list[float] = []
    for place in places:
        # u = place K and K = pi / (2 M), M the common limit of both means.
        angle = 2 ** (len(means) - 1) * place * math.pi / 2
        for mean, half in zip(means[:0:-1], halves[:0:-1], strict=True):
            angle = (angle + math.asin(half / mean * math.sin(angle))) / 2
        found.append(math.tan(angle))
    return found


@functools.cache
def best_rational(poles: int, lower: float) -> Rational:
    """The best function with a cubic term, which costs next to nothing where x^2 is at hand.

    It touches 1 + error and 1 - error in turns at 2 poles + 3 points, the ends among them: Newton's
    method for the function that does so at given points, then the extrema of that function as the
    new points, until they stay [Remez 1934].
    """
    start = zolotarev(poles, lower)
    logarithms = [math.log(v) for v in (*start.residues, *start.shifts)]
    unknowns = [start.linear, start.cubic, *logarithms, start.error]
    points = _extrema(start)
    # One more than without the cubic term: the last hill is left of 1 now, and a valley at 1.
    points = [*points[:-1], (points[-2] + 1) / 2, 1.0]
    for _ in range(20):
        unknowns = _levelled(unknowns, points, lower)
        f = _function(unknowns, lower)
        points = _extrema(f)
        if max(abs(f(x) - 1) for x in points) < f.error * (1 + 1e-9) + 1e-14:
            return f
    raise ConfigurationError(f"no best function found for poles={poles}, lower={lower}")


def _function(unknowns: Sequence[float], lower: float) -> Rational:
    linear, cubic, *logarithms, error = unknowns
    values = [math.exp(v) for v in logarithms]
    half = len(values) // 2
    return Rational(lower, linear, cubic, tuple(values[:half]), tuple(values[half:]), error)


def _levelled(unknowns: Sequence[float], points: Sequence[float], lower: float) -> list[float]:
    """The function that is 1 - error, 1 + error, ... at the points, from one that is near it."""
    current = list(unknowns)
    signs = [-1.0 if i % 2 == 0 else 1.0 for i in range(len(points))]
    for _ in range(100):
        f = _function(current, lower)
        rows: list[list[float]] = []
        for x, sign in zip(points, signs, strict=True):
            pairs = list(zip(f.residues, f.shifts, strict=True))
            by_residue = [a * x / (x * x + c) for a, c in pairs]
            by_shift = [-a * c * x / (x * x + c) ** 2 for a, c in pairs]
            rest = 1 + sign * f.error - f(x)
            rows.append([x, x**3, *by_residue, *by_shift, -sign, rest])
        step = _solved(rows)
        # Logarithms further off than this are no better than a guess.
        widest = max(map(abs, step[2:-1]))
        damping = min(1.0, 0.5 / widest) if widest else 1.0
        current = [value + damping * change for value, change in zip(current, step, strict=True)]
        if max(map(abs, step)) < 1e-13:
            break
    return current


def _solved(rows: list[list[float]]) -> list[float]:
    """x of A x = b by elimination with row pivots; rows are those of [A b]."""
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [b - factor * a for a, b in zip(rows[i], rows[k], strict=True)]
    x = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][k] * x[k] for k in range(i + 1, size))
        x[i] = (rows[i][size] - known) / rows[i][i]
    return x


def _extrema(f: Rational) -> list[float]:
    """Where f has its local extrema on [lower, 1], ends included."""
    points = [f.lower ** (1 - i / _GRID) for i in range(_GRID + 1)]
    values = [f(x) for x in points]
    found = [f.lower]
    for i in range(1, _GRID):
        if (values[i] - values[i - 1]) * (values[i + 1] - values[i]) < 0:
            found.append(_turn(f, points[i - 1], points[i + 1]))
    return [*found, 1.0]


def _turn(f: Callable[[float], float], left: float, right: float) -> float:
    """The extremum between two points, by thirds."""
    peak = f(math.sqrt(left * right)) > max(f(left), f(right))
    for _ in range(80):
        a, b = left + (right - left) / 3, right - (right - left) / 3
        if (f(a) < f(b)) == peak:
            left = a
        else:
            right = b
    return (left + right) / 2
