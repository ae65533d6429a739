"""Seeds derived from a position in the run, so that no random state has to be saved."""

import numpy as np


def derived_seed(seed: int, *position: int) -> int:
    """Return a seed for a position (a step, a batch of the step); positions have distinct seeds."""
    # A spawn key distinguishes (3,) from (3, 0); a list of entropy is padded with zeros.
    return int(np.random.SeedSequence(seed, spawn_key=position).generate_state(1)[0])
