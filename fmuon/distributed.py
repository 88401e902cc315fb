# SPDX-License-Identifier: Apache-2.0
"""Sharded training: what has to be done before a trace, and who does what.

DTensor leaves (fully_shard, tensor parallelism, or both) need nothing but this module's `prepare`
before a compiled update; for plain tensors that are the same on several ranks, as under DDP, say
`fmuon.muon(mesh=...)`. Each matrix is orthogonalised on one rank of its mesh.
"""

from fmuon.base import Transformation, Tree
from fmuon.functional import configuration_of


def prepare(opt: Transformation, params: Tree) -> None:
    """Make the process groups of an update, and check that all ranks have the same leaves.

    To be called on all ranks before an update of sharded leaves is compiled, also after a state was
    loaded; `opt.init` and `FMuon` call it.

    Raises:
        StateError: names the first leaf of which two ranks say different things.
    """
    configuration_of(opt).prepare(params)
