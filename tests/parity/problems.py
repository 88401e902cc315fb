# SPDX-License-Identifier: Apache-2.0
"""Weights and gradients for comparisons of 20 steps, the same on every machine.

The numbers come from numpy's generator, whose stream doesn't depend on the processor.
"""

import numpy as np

STEPS = 20

MATRICES = {
    "wide": (8, 24),
    "tall": (24, 8),
    "square": (12, 12),
    "row": (1, 16),
    "column": (16, 1),
}
CONVOLUTION = {"conv": (6, 4, 3, 2)}
EXPERTS = {"experts": (3, 10, 6)}
OTHERS = {"bias": (7,), "gain": (5,)}


def weights(shapes, seed=0):
    """Name -> float32 array, standard deviation 0.01: small beside what 20 steps add."""
    return {
        name: (0.01 * _normal((seed, 0, index), shape)).astype(np.float32)
        for index, (name, shape) in enumerate(shapes.items())
    }


def gradients(shapes, step, spectrum="gaussian", seed=0):
    """Name -> float32 array for step 0, 1, ...; unlike at every step.

    A "decaying" spectrum falls by three orders of magnitude over the last axis.
    """
    grads = {}
    for index, (name, shape) in enumerate(shapes.items()):
        grad = _normal((seed, 1 + step, index), shape)
        if spectrum == "decaying":
            grad = grad * np.logspace(0, -3, shape[-1])
        grads[name] = grad.astype(np.float32)
    return grads


def _normal(key, shape):
    return np.random.default_rng(key).standard_normal(shape)
