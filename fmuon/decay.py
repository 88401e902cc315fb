# SPDX-License-Identifier: Apache-2.0
"""Forms of weight decay.

"decoupled" is W <- W - lr weight_decay W, as torch.optim.AdamW has it [Loshchilov and Hutter 2019,
arXiv 1711.05101, algorithm 2]. "cautious" leaves out the entries that the rest of the update pushes
away from zero [Chen et al. 2025, arXiv 2510.12402, algorithm 1].
"""

from typing import NamedTuple


class Decay(NamedTuple):
    """How weights decay: W <- W - lr^power weight_decay W.

    `cautious`: only entries that the rest of the update doesn't push away from zero.
    """

    power: int
    cautious: bool


DECAYS = {
    "decoupled": Decay(1, cautious=False),
    # The same with the learning rate left out.
    "independent": Decay(0, cautious=False),
    # As that of modded-nanogpt: a schedule of the rate counts twice.
    "squared": Decay(2, cautious=False),
    "cautious": Decay(1, cautious=True),
    "cautious_independent": Decay(0, cautious=True),
    "cautious_squared": Decay(2, cautious=True),
}
