"""From what the device pooled of a prompt to its embedding."""

from __future__ import annotations

import numpy as np


def unit_vector(pooled: np.ndarray) -> np.ndarray | None:
    """`pooled` [H] at length 1, float32 and read-only; None where it has no direction.

    So a sum over the prompt does for its mean: they differ in length only.
    """
    length = np.linalg.norm(pooled)
    if not np.isfinite(length) or length == 0:
        return None
    vector = (pooled / length).astype(np.float32)
    vector.flags.writeable = False
    return vector
