# SPDX-License-Identifier: Apache-2.0
"""Shapes of the weight matrices of small models, in one place.

A shape is (rows, columns) of a matrix as `torch.nn.Linear.weight` holds it; a convolution is its
matrix of (out, in * height * width), since some peers take 2-D parameters only.
"""

from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Inventory:
    """The matrices of one model, in the order of its parameters; `others` are for another rule."""

    title: str
    shapes: tuple[Shape, ...]
    others: tuple[tuple[int, ...], ...] = ()


def gpt(width: int, layers: int, *, fused: bool) -> tuple[Shape, ...]:
    """Attention and a feed-forward block four times as wide; query, key and value fused or not."""
    square = (width, width)
    attention = ((3 * width, width), square) if fused else (square,) * 4
    return (*attention, (4 * width, width), (width, 4 * width)) * layers


def llama(width: int, hidden: int, layers: int) -> tuple[Shape, ...]:
    """Query, key, value and output; then gate, up and down."""
    return (*((width, width),) * 4, *((hidden, width),) * 2, (width, hidden)) * layers


def convolutions(widths: tuple[int, ...], blocks: int) -> tuple[Shape, ...]:
    """A backbone: per stage a 3 x 3 convolution that downsamples, then blocks.

    A block splits its channels by a 1 x 1 convolution, runs four 3 x 3 convolutions on half of them
    and joins the intermediate results by another 1 x 1. Two 1 x 1 convolutions close the network.
    """
    shapes: list[Shape] = []
    before = 3
    for width in widths:
        half = width // 2
        block = ((width, width), *((half, 9 * half),) * 4, (width, 2 * width))
        shapes += [(width, 9 * before), *block * blocks]
        before = width
    return (*shapes, (before // 2, before), (before, 2 * before))


INVENTORIES: dict[str, Inventory] = {
    "gpt-128": Inventory("24 matrices of a GPT, d = 128", gpt(128, 4, fused=False)),
    "conv-126": Inventory("126 convolutions", convolutions((16, 32, 64, 128), 5)),
    "gpt-256": Inventory("16 matrices of a GPT, d = 256", gpt(256, 4, fused=True)),
    "llama-512": Inventory("14 matrices of a Llama, d = 512", llama(512, 2048, 2)),
}
GPU: dict[str, Inventory] = {
    "gpt2-124m": Inventory("GPT-2 124M, all 12 layers", gpt(768, 12, fused=True)),
    "llama-1b": Inventory("a Llama of 1.1B, 8 of 22 layers", llama(2048, 5632, 8)),
    "llama-7b": Inventory("Llama 7B, 2 of 32 layers", llama(4096, 11008, 2)),
}
GPT2 = Inventory(
    "GPT-2 124M, 148 leaves",
    gpt(768, 12, fused=True),
    # Embeddings, then the biases and norms of every layer, and the last norm.
    ((50257, 768), (1024, 768), *((2304,), (768,), (3072,), *((768,),) * 5) * 12, (768,), (768,)),
)
TRIAL = {"trial": Inventory("a few small matrices, to try a benchmark", gpt(32, 1, fused=False))}
