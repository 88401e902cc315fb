# SPDX-License-Identifier: Apache-2.0
"""How a momentum is kept in 8 bits; the only user of torchao, loaded by the call that needs it.

The codes have the shape of the leaf, and every block of at most `BLOCK` elements has a float32
scale. Blocks lie along one axis, or the last few taken as one; the scales have the axes of the
leaf, with as many entries there as blocks, so that what cuts the leaf along another axis cuts the
scales alike. Both shapes together say where the blocks are.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmuon.base import ConfigurationError, LeafError

# One more block for one more element: 4 bytes in 273 are still less than 3 percent for two.
BLOCK = 272
_EXPONENT = 0.6


class Format(NamedTuple):
    """A way to keep numbers in 8 bits.

    `encode` maps rows [n, block] to codes of that shape, of the dtype `codes`, and scales [n];
    `decode` maps them back.
    """

    codes: torch.dtype
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]
    needs_torchao: bool


def _encode_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Linear in the signed power 0.6, which has finer steps where most of the momentum is.

    Codes are linear in each block of the rows [Gupta et al. 2025, arXiv 2509.23106, section 3].
    """
    if rows.shape[1] == 1:
        # torchao takes blocks of one element for none.
        codes, scale = _encode_int8(torch.nn.functional.pad(rows, (0, 1)))
        return codes[:, :1], scale
    primitives = _torchao()
    companded = rows.sign() * rows.abs().pow(_EXPONENT)
    block = 1, rows.shape[1]
    scale, zero = primitives.choose_qparams_affine(
        companded,
        primitives.MappingType.SYMMETRIC,
        block,
        torch.int8,
        quant_min=-127,
        quant_max=127,
        eps=1e-30,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int8,
    )
    codes = primitives.quantize_affine(companded, block, scale, zero, torch.int8, -127, 127)
    return codes, scale.flatten()


def _decode_int8(codes: Tensor, scale: Tensor) -> Tensor:
    if codes.shape[1] == 1:
        return _decode_int8(torch.nn.functional.pad(codes, (0, 1)), scale)[:, :1]
    zero = torch.zeros_like(scale, dtype=torch.int8)
    block = 1, codes.shape[1]
    companded = _torchao().dequantize_affine(
        codes, block, scale, zero, torch.int8, -127, 127, output_dtype=torch.float32
    )
    return companded.sign() * companded.abs().pow(1 / _EXPONENT)


def _encode_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 without infinities, scaled so that its largest value is the block's."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (rows.abs().amax(1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (rows / scale.unsqueeze(1)).clamp(-largest, largest).to(torch.float8_e4m3fn)
    # As bytes, which every backend of torch.distributed can send.
    return codes.view(torch.uint8), scale


def _decode_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32) * scale.unsqueeze(1)


FORMATS = {
    "int8": Format(torch.int8, _encode_int8, _decode_int8, needs_torchao=True),
    "fp8": Format(torch.uint8, _encode_fp8, _decode_fp8, needs_torchao=False),
}


def _torchao() -> Any:
    try:
        from torchao.quantization import quant_primitives  # pyright: ignore
    except ImportError as error:
        raise ConfigurationError(
            "momentum_dtype='int8' needs torchao: pip install 'fmuon[lowbit]'"
        ) from error
    return quant_primitives


def check_installed(name: str) -> None:
    """Raise where what a format needs is missing."""
    if FORMATS[name].needs_torchao:
        _torchao()


# ---- where the blocks are ------------------------------------------------------------------------


def scale_shape(path: str, shape: tuple[int, ...], parts: Mapping[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a leaf; `parts` says into how many an axis is cut.

    Blocks lie along the last axis that isn't cut, together with those before it (but not the first)
    as long as that is less than a block; else along the last, a whole number of them in every part.
    """
    whole = [axis for axis in range(len(shape)) if axis not in parts]
    if not whole:
        length, rest = divmod(shape[-1], parts[len(shape) - 1])
        if rest:
            raise LeafError(
                f"{path!r}: every axis of its shape {shape} is sharded, the last into "
                f"{parts[len(shape) - 1]} parts of unequal length, and a momentum of 8 bits needs "
                f"one that is whole or evenly cut; shard it otherwise, or set momentum_dtype=None"
            )
        return (*shape[:-1], parts[len(shape) - 1] * -(-length // BLOCK))
    stop = whole[-1] + 1
    start = whole[-1]
    while start - 1 in {*whole} - {0} and prod(shape[start:stop]) < BLOCK:
        start -= 1
    blocks = -(-prod(shape[start:stop]) // BLOCK)
    return (*shape[:start], blocks, *[1] * (stop - start - 1), *shape[stop:])


def own_scale_shape(
    scales: tuple[int, ...],
    shape: tuple[int, ...],
    own: tuple[int, ...],
    parts: Mapping[int, int],
) -> tuple[int, ...]:
    """The shape of the part of the scales that goes with a part of that own shape."""

    def side(axis: int) -> int:
        if axis not in parts:
            return scales[axis]
        return own[axis] if scales[axis] == shape[axis] else scales[axis] // parts[axis]

    return tuple(map(side, range(len(shape))))


def fits(shape: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Whether scales of that shape can be those of a leaf."""
    if len(shape) != len(scales):
        return False
    start, stop = _blocked(shape, scales)
    return shape[:start] == scales[:start] and all(side == 1 for side in scales[start + 1 : stop])


def _blocked(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """(start, stop) of the axes that blocks lie along."""
    differ = [axis for axis in range(len(shape)) if shape[axis] != scales[axis]]
    # Without a difference every element is a block, along any axis.
    return (differ[0], differ[-1] + 1) if differ else (len(shape) - 1, len(shape))


class _Layout(NamedTuple):
    """A leaf as [lead, row, rest] with `blocks` blocks of `length` along its rows."""

    lead: int
    row: int
    rest: int
    blocks: int
    length: int


def _layout(shape: tuple[int, ...], scales: tuple[int, ...]) -> _Layout:
    start, stop = _blocked(shape, scales)
    row, blocks = prod(shape[start:stop]), scales[start]
    return _Layout(prod(shape[:start]), row, prod(shape[stop:]), blocks, -(-row // blocks))


def _to_blocks(x: Tensor, layout: _Layout) -> Tensor:
    """[n, length], the last of every row filled with zeros."""
    lead, row, rest, blocks, length = layout
    rows = torch.nn.functional.pad(x.reshape(lead, row, rest).mT, (0, blocks * length - row))
    return rows.reshape(-1, length)


def _from_blocks(values: Tensor, layout: _Layout, shape: tuple[int, ...]) -> Tensor:
    lead, row, rest, blocks, length = layout
    return values.reshape(lead, rest, blocks * length)[..., :row].mT.reshape(shape)


def encode(name: str, x: Tensor, scales: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(codes of the shape of x, scales of the given shape)."""
    if not x.numel():
        return torch.zeros_like(x, dtype=FORMATS[name].codes), x.new_zeros(scales)
    layout = _layout(x.shape, scales)
    codes, scale = FORMATS[name].encode(_to_blocks(x.to(torch.float32), layout))
    scale = scale.reshape(layout.lead, layout.rest, layout.blocks).mT
    return _from_blocks(codes, layout, x.shape), scale.reshape(scales)


def decode(name: str, codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 that codes and scales stand for."""
    if not codes.numel():
        return scale.new_zeros(codes.shape)
    layout = _layout(codes.shape, scale.shape)
    each = scale.reshape(layout.lead, layout.blocks, layout.rest).mT.reshape(-1)
    values = FORMATS[name].decode(_to_blocks(codes, layout), each)
    return _from_blocks(values, layout, codes.shape)
