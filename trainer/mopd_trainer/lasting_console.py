"""``LastingConsole``: a console that a run outlives."""

import os
import sys

from rich.console import Console


class LastingConsole(Console):
    """Says nothing more when nobody reads on (``mopd train … | head``, a ``tee`` that was killed),
    where rich would end the process: what a run has learnt since its last checkpoint is worth more
    than its lines."""

    def on_broken_pipe(self) -> None:
        """See ``Console``."""
        self.quiet = True
        # Or Python would try again to write what is left, at the very end, and complain.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
