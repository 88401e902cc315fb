# SPDX-License-Identifier: Apache-2.0
"""Which parameter is trained by what, from a configuration file, and how to see it.

    python examples/03_partition_and_explain.py    (--smoke does the same: it takes seconds)

Labels are an ordered dict: a key is the name of a parameter, or "re:" and a pattern for whole
names, and the first match wins. Ending with {"re:.*": "error"} makes the configuration strict: a
parameter that nobody thought of is an error and not a default.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fmuon

# A dict is a view: which axes are the rows and the columns of the matrix, and how it splits.
CONFIGURATION = r"""
{
  "re:blocks\\.0\\..*":               "frozen",
  "patches.weight":                   {"fan_out": 0, "fan_in": [1, 2, 3]},
  "re:blocks\\.\\d+\\.qkv\\.weight":  {"blocks": [48, 48, 48]},
  "re:blocks\\.\\d+\\.out\\.weight":  "muon",
  "re:blocks\\.\\d+\\.experts":       {"fan_out": 1, "fan_in": 2},
  "re:.*\\.bias|.*norm\\.weight":     "adamw",
  "positions":                        "adamw",
  "head.weight":                      "adamw",
  "re:.*":                            "error"
}
"""


class Block(nn.Module):
    """Attention over patches, and a mean of experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, patches, width) -> the same."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + torch.einsum("btd,edf->btf", F.gelu(x), self.experts) / len(self.experts)


class Model(nn.Module):
    """A small vision transformer for 16 x 16 images."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Block(width, experts=3) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, 16, 16) -> (batch, 10)."""
        x = self.patches(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def labels_of(text: str) -> dict[str, fmuon.Matrix | str]:
    """The labels that a configuration stands for."""
    return {
        key: fmuon.Matrix(**value) if isinstance(value, dict) else value
        for key, value in json.loads(text).items()
    }


def main() -> None:
    """Explain, go wrong on purpose, and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="the same")
    parser.parse_args()
    torch.manual_seed(0)
    model, labels = Model(), labels_of(CONFIGURATION)

    # Takes `positions` for a matrix, and warns of the experts: three axes can mean many things.
    print("BY DEFAULT")
    print(fmuon.explain(model))
    print("\nBY THE CONFIGURATION")
    print(fmuon.explain(model, fmuon.muon(labels=labels)))

    wrong = {
        "a name with a typo": {"block.1.qkv.weight": "muon", **labels},
        "a pattern with a typo": {r"re:block\.\d+\.qkv\.weight": "muon", **labels},
        "a label with a typo": labels | {"head.weight": "adam"},
        "blocks that don't fit": {"blocks.1.qkv.weight": fmuon.Matrix(blocks=(48, 48)), **labels},
        "a parameter that was forgotten": {k: v for k, v in labels.items() if k != "positions"},
    }
    print("\nWHAT GOES WRONG")
    for what, given in wrong.items():
        try:
            fmuon.FMuon(model, labels=given)
        except fmuon.LeafError as error:
            print(f"{what}:\n    {error}")

    optimizer = fmuon.FMuon(model, lr=1e-3, labels=labels)
    # Frozen is left out by the optimizer; requires_grad_(False) would save its backward pass too.
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        images = torch.randn(8, 3, 16, 16)
        optimizer.zero_grad()
        F.cross_entropy(model(images), torch.randint(10, (8,))).backward()
        optimizer.step()
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    print(f"\nunchanged after 3 steps: {', '.join(still)}")


if __name__ == "__main__":
    main()
