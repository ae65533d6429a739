"""Seeds that are functions of a place in the run, so that nothing random has to be remembered."""

import numpy as np


def derived_seed(seed: int, *place: int) -> int:
    """A seed for one place of a run (a step, a batch of it), different from every other place's."""
    # A spawn key tells (3,) from (3, 0); a plain list of entropy is filled up with zeros.
    return int(np.random.SeedSequence(seed, spawn_key=place).generate_state(1)[0])
