"""Adasum in float64, written from the formula of Maleki et al., "Scaling Distributed Training with Adaptive Summation"
(MLSys 2021)."""

import numpy as np


def pair(a, b):
    aa, ab, bb = (a * a).sum(), (a * b).sum(), (b * b).sum()
    of_a = 1.0 if aa == 0 else 1 - ab / (2 * aa)
    of_b = 1.0 if bb == 0 else 1 - ab / (2 * bb)
    return of_a * a + of_b * b


def adasum(vectors):
    """Adasum of the ranks' vectors (2^n of them, of any shape) along a binary tree over the ranks."""
    vectors = [np.asarray(vector, np.float64) for vector in vectors]
    while len(vectors) > 1:
        vectors = [pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]
