# SPDX-License-Identifier: Apache-2.0
"""One pointwise operation over lists of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]


@torch.compiler.assume_constant_result
def _inside_functorch() -> bool:
    return _functorch.maybe_current_level() is not None


def foreach(operation: str, *operands: Sequence[Tensor]) -> list[Tensor]:
    """Apply `torch.<operation>` to the i-th entries of all lists, for every i.

    One `torch._foreach_<operation>` call; inside `torch.func.vmap` or `grad`, which have no rules
    for those, a loop.
    """
    if not operands[0]:
        return []
    if _inside_functorch():
        function = getattr(torch, operation)
        return [function(*entries) for entries in zip(*operands, strict=True)]
    return list(getattr(torch, f"_foreach_{operation}")(*map(list, operands)))
