# SPDX-License-Identifier: Apache-2.0
"""Weights of 16 bits: rounding that is right on average, and the bits that rounding drops.

Rounded to the nearest, a bfloat16 weight ignores every update below a 512th of its size. Either
the rounding is drawn at random, up or down, so that the mean of many steps is that of float32; or
what the weight can't hold is kept beside it, so that the pair is a float32.

What is drawn depends on seed, leaf, update and element only: a hash, not the state of a generator,
so that it is the same in a graph, after a restart, and in every part of a sharded leaf.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmuon.base import ConfigurationError, constant_in_graphs, lookup

# Significant bits, and the smallest distance between two values that rounding keeps apart: that of
# float16, and for bfloat16 the smallest whose reciprocal is finite in float32.
_FORMATS = {torch.bfloat16: (8, 2.0**-126), torch.float16: (11, 2.0**-24)}


@dataclass(frozen=True)
class Stochastic:
    """Up with the probability of what nearest rounding would drop, else down.

    The mean over seeds is the float32 value [Gupta et al. 2015, arXiv 1502.02551, section 3].
    Values that the format holds stay as they are.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"Stochastic: seed={self.seed!r}; give an int")

    def __call__(self, x: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
        """float32 -> float32 of values that `dtype` (bfloat16 or float16) holds.

        `noise` are int32 of 32 random bits each, one per element.
        """
        significant, finest = _FORMATS[dtype]
        power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
        step = (power * 2.0 ** (1 - significant)).clamp(min=finest)
        dropped = 24 - significant
        uniform = _shifted(noise, 32 - dropped).to(torch.float32) * 2.0**-dropped
        rounded = torch.floor(x / step + uniform) * step
        return torch.where(x.isfinite(), rounded, x)


ROUNDINGS: dict[str, Stochastic | None] = {"nearest": None, "stochastic": Stochastic()}


def rounding_method(method: Any) -> Stochastic | None:
    """The rounding of that name, None for the nearest; a `Stochastic` passes through."""
    if isinstance(method, str):
        return lookup(ROUNDINGS, method, "rounding")
    if method is None or isinstance(method, Stochastic):
        return method
    raise ConfigurationError(
        f"rounding={method!r}; known: {', '.join(map(repr, ROUNDINGS))}, a fmuon.Stochastic"
    )


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype hold fewer bits than their updates."""
    return dtype in _FORMATS


# ---- random bits ---------------------------------------------------------------------------------


def noise(
    key: int, count: Tensor, shape: Sequence[int], block: Sequence[tuple[int, int]]
) -> Tensor:
    """32 random bits for every element of a block of a leaf, int32.

    Args:
        key: of seed and leaf, see `leaf_key`.
        count: the number of the update, 0-d.
        shape: of the whole leaf.
        block: (start, stop) for each of its axes.
    """
    index = torch.zeros((), dtype=torch.int32, device=count.device)
    stride = 1
    for axis in reversed(range(len(shape))):
        start, stop = block[axis]
        own = torch.arange(start, stop, dtype=torch.int32, device=count.device)
        own = own.reshape(-1, *[1] * (len(shape) - 1 - axis))
        index = index + own * _signed(stride)
        stride *= shape[axis]
    first = _mixed((count.to(torch.int32) * _signed(0x9E3779B9)) ^ key)
    second = _mixed(first ^ _signed(0x85EBCA6B))
    return _mixed(_mixed(index ^ first) + second)


@constant_in_graphs
def leaf_key(seed: int, path: str) -> int:
    """32 bits of a seed and a leaf's path, as a signed integer."""
    return _signed(zlib.crc32(f"{seed}:{path}".encode()))


def _mixed(x: Tensor) -> Tensor:
    """A permutation of the 32-bit integers that leaves no trace of their order.

    The constants are Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/).
    """
    x = (x ^ _shifted(x, 16)) * _signed(0x7FEB352D)
    x = (x ^ _shifted(x, 15)) * _signed(0x846CA68B)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right as if unsigned."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """The lowest 32 bits of an integer as those of an int32."""
    return (value + 2**31) % 2**32 - 2**31


# ---- mantissas -----------------------------------------------------------------------------------


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (float32 that bfloat16 holds, the nearest; mantissa), which `joined` undoes.

    The mantissa is the difference of the two as integers, in [-2^15, 2^15), in two bytes along a
    further axis: uint8, which unlike int16 every backend of torch.distributed can send.
    """
    bits = x.view(torch.int32)
    nearest = (bits + 0x8000) & ~0xFFFF
    finite = x.isfinite()
    rest = torch.where(finite, bits - nearest, 0)
    mantissa = torch.stack([rest & 0xFF, (rest >> 8) & 0xFF], -1).to(torch.uint8)
    return torch.where(finite, nearest.view(torch.float32), x), mantissa


def joined(weight: Tensor, mantissa: Tensor) -> Tensor:
    """The float32 of a bfloat16 weight and its mantissa.

    A weight that was changed meanwhile keeps its mantissa, which is half a unit of its last place
    at most.
    """
    low, high = mantissa.to(torch.int32).unbind(-1)
    rest = ((low + high * 256) ^ 0x8000) - 0x8000
    # Below zero is no further value of that sign, beyond infinity none at all.
    rest = torch.where(weight == 0, rest.clamp(min=0), rest)
    rest = torch.where(weight.isfinite(), rest, 0)
    return (weight.to(torch.float32).view(torch.int32) + rest).view(torch.float32)
