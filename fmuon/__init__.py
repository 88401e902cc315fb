# SPDX-License-Identifier: Apache-2.0
"""fmuon: a functional Muon optimizer for PyTorch, built to be compiled.

The house. A module imports only from lower floors; a test reads this table and checks.

floor | module | job
0 | base | contracts and vocabulary: Transformation, Matrix, Stack, Scalar, errors
0 | triton_kernels | kernels for GPUs; imported by the call that uses one
1 | coefficients | Newton-Schulz polynomials exactly as published; no torch
1 | rational | best odd rational approximations of the sign; no torch
1 | scaling | matrix shape -> multiplier; no torch
1 | tree | pytree <-> flat leaves with path names
1 | scalars | numbers, schedules and per-leaf dicts -> tensors
1 | decay | forms of weight decay
1 | momentum | average, Nesterov look-ahead, bias correction
1 | sharding | where the parts of a sharded leaf are, and who its owner is; integers only
1 | symmetric | products whose result is symmetric
1 | surgery | which leaf of an old state a leaf of a changed model goes on from
1 | rounding | weights of 16 bits: stochastic rounding, and the bits that rounding drops
1 | lowbit | how a momentum is kept in 8 bits; the only user of torchao
2 | collectives | sharded leaves to their owners and back; the only user of torch.distributed
2 | clipping | global norm of gradients, clipping by it, are they finite
2 | metrics | what an update did to each leaf, for a logger
2 | orthogonalize | stack of matrices -> nearest semi-orthogonal stack
2 | auxiliary | AdamW, NAdamW, Lion, SGD for everything that is not a matrix
2 | partition | leaves -> labels, each with its reason and its matrix view
2 | buckets | labelled leaves -> hashable plan of same-shape stacks; stack and unstack
3 | attention | scale back the heads whose logits are too large, after an update
3 | balance | rows and columns of equal size, before and after
3 | zolotarev | the nearest stack by a rational function of the Gram matrix
4 | second_moment | even out how fast rows or entries of the factor move
4 | methods | the methods by name, and the choice of one by cost
5 | planning | configuration and signature of a call -> who is updated with whom
6 | call | the leaves and scalars of one call
7 | functional | the algorithm: muon, init, update, update_, apply_updates
8 | state_dicts | the format of FMuon's state dict, and what is refused as none
8 | foreign | any torch optimizer as the auxiliary rule of FMuon
8 | distributed | preparing sharded updates, and who does what in them
8 | presets | the published optimizers as rows of configuration
8 | compilation | the only call to torch.compile
9 | explanation | what every leaf gets and why, and on which rank
9 | optimizer | FMuon, the torch.optim shim
10 | interop | other optimizers' checkpoints in and out; factories for trainers
"""

from fmuon import distributed, interop, presets
from fmuon.attention import Attention, Heads, qk_clip
from fmuon.auxiliary import adamw, lion, nadamw, sgd
from fmuon.base import (
    ConfigurationError,
    FMuonError,
    LeafError,
    Matrix,
    StateError,
    Transformation,
)
from fmuon.clipping import clip_by_global_norm, global_norm
from fmuon.compilation import compile
from fmuon.explanation import explain
from fmuon.functional import adapt_state, apply_updates, init, muon, update, update_
from fmuon.methods import Auto
from fmuon.optimizer import FMuon, parameter_lists
from fmuon.orthogonalize import GramNewtonSchulz, NewtonSchulz, PolarSVD
from fmuon.partition import label
from fmuon.rounding import Stochastic
from fmuon.second_moment import AdaMuon, NorMuon
from fmuon.zolotarev import Zolotarev

__version__ = "0.1.0"

__all__ = [
    "AdaMuon",
    "Attention",
    "Auto",
    "ConfigurationError",
    "FMuon",
    "FMuonError",
    "GramNewtonSchulz",
    "Heads",
    "LeafError",
    "Matrix",
    "NewtonSchulz",
    "NorMuon",
    "PolarSVD",
    "StateError",
    "Stochastic",
    "Transformation",
    "Zolotarev",
    "adamw",
    "adapt_state",
    "apply_updates",
    "clip_by_global_norm",
    "compile",
    "distributed",
    "explain",
    "global_norm",
    "init",
    "interop",
    "label",
    "lion",
    "muon",
    "nadamw",
    "parameter_lists",
    "presets",
    "qk_clip",
    "sgd",
    "update",
    "update_",
]
