"""Seeds that are functions of a place in the run, so that nothing random has to be remembered."""

import numpy as np


def derived_seed(seed: int, *place: int) -> int:
    """A seed for one place of a run (a step, a batch of it), different from every other place's."""
    return int(np.random.SeedSequence([seed, *place]).generate_state(1)[0])
