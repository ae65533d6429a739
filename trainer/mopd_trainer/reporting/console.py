"""``make_console``: a console that survives a closed terminal or a broken pipe."""

import errno
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging


class ResilientConsole(Console):
    """Console that becomes quiet on EPIPE or EIO (``mopd train … | head``, a closed terminal), so
    that the run continues; rich would exit."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # a closed terminal; rich handles EPIPE
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """See ``Console``."""
        self.quiet = True
        silence(sys.stdout)


def make_console() -> ResilientConsole:
    """Return a console, and disable the progress bars and warnings of transformers."""
    # Tokenizers warn about threads after a fork; no process forks after using a tokenizer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    transformers_logging.disable_progress_bar()
    return ResilientConsole()


def silence(stream: TextIO) -> None:
    """Redirect a broken stream to the null device; flushing at exit would change the exit code."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def key_value_table(rows: Sequence[tuple[str, str | Text]]) -> Table:
    """Return a table with bold keys."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(Text(key), Text(value) if isinstance(value, str) else value)
    return table
