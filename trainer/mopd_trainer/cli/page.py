"""Options of the commands that serve a page."""

import argparse
import sys
import webbrowser
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mopd_trainer.pages.server import PageServer


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add ``--host``, ``--port`` and ``--open``."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine; there are no passwords)",
    )
    parser.add_argument(
        "--port", type=int, default=8300, help="0 for a free one (default: %(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def serve_page(server: "PageServer", *, is_opened: bool) -> None:
    """Print the address of a page, and serve it until SIGINT."""
    sys.stdout.write(f"serving {server.url} (stop with Ctrl-C)\n")
    sys.stdout.flush()
    if is_opened:
        webbrowser.open(server.url)
    server.serve_until_interrupted()
