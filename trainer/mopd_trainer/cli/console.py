"""``ResilientConsole``: a console that a run outlives."""

import errno
import os
import sys
from typing import TextIO

from rich.console import Console


class ResilientConsole(Console):
    """Says nothing more when nobody reads on (``mopd train … | head``, a ``tee`` that was killed, a
    terminal that was closed), where rich would end the process: what a run has learnt since its
    last checkpoint is worth more than its lines."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:  # a closed terminal is no broken pipe
            if error.errno != errno.EIO:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """See ``Console``."""
        self.quiet = True
        silence(sys.stdout)


def silence(stream: TextIO) -> None:
    """What is left to write goes nowhere, or Python would try again at the very end, and end with
    another status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
