# SPDX-License-Identifier: Apache-2.0
"""The slow truth: one matrix at a time, in float64, line by line from the formulas.

Nothing here uses fmuon; the tests compare it with fmuon.
"""

import math

import torch

JORDAN = ((3.4445, -4.7750, 2.0315),) * 5


# Typed a second time from the sources, against slips of the pen.
PUBLISHED = {
    "jordan": ((3.4445, -4.7750, 2.0315),),
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def newton_schulz(x, triples=JORDAN, norm_safety=1.0):
    """X <- a X + (b A + c A A) X with A = X X^T, on X / (safety |X|_F). [Jordan 2024]"""
    x = x.double()
    if x.norm() == 0:
        return x
    x = x / (x.norm() * norm_safety)
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def scalar_response(s, triples=JORDAN):
    """What the iteration makes of one singular value."""
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


SCALES = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
    "none": lambda rows, columns: 1.0,
}


def muon_step(w, g, m, t, *, lr, b, nesterov, bias_correction, weight_decay, scale):
    """(W', M') of one matrix; t is 1 on the first step."""
    w, g, m = w.double(), g.double(), m.double()
    m = b * m + (1 - b) * g
    average, gradient = (1.0, 1.0)
    if bias_correction:
        average = 1 - b ** (t + 1) if nesterov else 1 - b**t
        gradient = 1 - b**t
    u = b * m / average + (1 - b) * g / gradient if nesterov else m / average
    o = newton_schulz(u)
    return w - lr * (SCALES[scale](*w.shape) * o + weight_decay * w), m


def adamw_step(w, g, m, v, t, *, lr, betas, eps, weight_decay, nesterov=False):
    """(W', m', v'). [Loshchilov and Hutter 2019, algorithm 2; Dozat 2016]"""
    b1, b2 = betas
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    first = m / (1 - b1**t)
    if nesterov:
        first = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    return w - lr * (first / ((v / (1 - b2**t)).sqrt() + eps) + weight_decay * w), m, v


def lion_step(w, g, m, *, lr, betas, weight_decay):
    """(W', m'). [Chen et al. 2023, algorithm 2]"""
    b1, b2 = betas
    direction = (b1 * m + (1 - b1) * g).sign()
    return w - lr * (direction + weight_decay * w), b2 * m + (1 - b2) * g


def polar(x):
    """U V^T of the singular value decomposition."""
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh
