# SPDX-License-Identifier: Apache-2.0
"""How evenly is the work of a sharded step spread over 8 to 1024 ranks?

    python benchmarks/ranks.py

Integers only, nothing runs: the plan of `fmuon.distributed` for every rank of a mesh on which rows
are sharded, in bfloat16. "flops" is the busiest rank over the mean, and beside it what no plan of
whole matrices can be below: one matrix, where there are fewer matrices than ranks. "bytes" is what
the busiest rank sends over the mean. "padded" is the same for a plan that fills every group of
equal shapes up to a multiple of the number of ranks, and sends the padding too.
"""

import math
from collections import Counter

import torch

from fmuon.base import Matrix
from fmuon.buckets import MatrixLeaf
from fmuon.distributed import shares
from fmuon.methods import flops_of
from fmuon.orthogonalize import NewtonSchulz
from fmuon.sharding import Mesh, Sharding, Split

RANKS = (8, 64, 256, 1024)


def repeated(layers, shapes):
    """The shapes of a layer, for all layers."""
    return [shape for _ in range(layers) for shape in shapes]


MODELS = {
    "GPT-2 124M": repeated(12, [(768, 768)] * 4 + [(3072, 768), (768, 3072)]),
    "Llama 7B": repeated(32, [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]),
    "mixture of experts": repeated(
        16, [(2048, 2048)] * 4 + [(1024, 2048), (1024, 2048), (2048, 1024)] * 64
    ),
}


def leaves(shapes, ranks):
    """Matrices whose rows are sharded over some ranks."""
    mesh = Mesh((ranks,), tuple(range(ranks)), (0,))
    return [
        MatrixLeaf(
            f"{index:05}", Matrix().view("", shape), torch.bfloat16, torch.device("meta"),
            Sharding(shape, mesh, (Split(0),)),
        )
        for index, shape in enumerate(shapes)
    ]  # fmt: skip


def padded(shapes, ranks, flops):
    """(flops, bytes) of a rank that gets an equal share of every padded group, over the mean."""
    each = {shape: math.ceil(count / ranks) for shape, count in Counter(shapes).items()}
    work = sum(count * flops(min(shape), max(shape)) for shape, count in each.items())
    mean = sum(flops(min(shape), max(shape)) for shape in shapes) / ranks
    sent = sum(count * math.prod(shape) for shape, count in each.items())
    return work / mean, sent / (sum(map(math.prod, shapes)) / ranks)


def main():
    """Print the table."""
    flops = flops_of(NewtonSchulz())
    print("| model | matrices | ranks | flops | at least | padded | bytes | padded |")
    print("|---|---|---|---|---|---|---|---|")
    for name, shapes in MODELS.items():
        costs = [flops(min(shape), max(shape)) for shape in shapes]
        for ranks in RANKS:
            found = shares(leaves(shapes, ranks), flops)
            bound = max(1.0, max(costs) / (sum(costs) / ranks))
            work, sent = padded(shapes, ranks, flops)
            print(
                f"| {name} | {len(shapes)} | {ranks} | {found.imbalance:.3f} | {bound:.3f} | "
                f"{work:.3f} | {found.sent_imbalance:.3f} | {sent:.3f} |"
            )


if __name__ == "__main__":
    main()
