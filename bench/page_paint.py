"""Time until the page of a long run is visible, in headless Chromium.

    python -m bench.page_paint [--steps 10000] [--teachers 4]

Needs `make test-browser` once. The run is made, not trained: every metric of several teachers in
each step, and 4 MB of completions. Reported: seconds to write the file, its size, and from the
start of the navigation the first contentful paint and the first drawn chart, of the file and of the
served page (which includes that the server reads the new lines of the run); medians.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.table import Table

from mopd_trainer import report
from tests.browser.conftest import ARGUMENTS, PROGRAMS
from tests.trainer.pages.made_runs import completions, journal, write_run

_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_CHART = "() => performance.now()"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--teachers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    table = Table("page", "written in s", "size in MB", "first paint in s", "first chart in s")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = made_run(Path(folder) / "run", options.steps, options.teachers)
        started = time.perf_counter()
        path = report(run)
        seconds = time.perf_counter() - started
        program = next(filter(None, map(shutil.which, PROGRAMS)))
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        size = f"{path.stat().st_size / 1e6:.1f}"
        paint, chart = measure(browser, path.as_uri(), options.repeats)
        table.add_row("file", f"{seconds:.2f}", size, f"{paint:.2f}", f"{chart:.2f}")
        with served(run) as url:
            paint, chart = measure(browser, url, options.repeats)
            table.add_row("served", "", size, f"{paint:.2f}", f"{chart:.2f}")
        browser.close()
    Console().print(table)


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Serve a run with ``mopd watch``; yield its address."""
    command = [sys.executable, "-m", "mopd", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
        process.terminate()


def made_run(folder: Path, steps: int, teachers: int) -> Path:
    """Write a run folder."""
    lines: list[dict[str, Any]] = []
    for line in journal(steps):
        each = {k: v for k, v in line.items() if k.startswith("teacher/math/")}
        more = {
            key.replace("math", f"teacher-{number}") + suffix: value
            for number in range(teachers)
            for suffix in ("", "_a", "_b")
            for key, value in each.items()
        }
        lines.append(line | more)
    return write_run(folder, lines, completions(6_000))


def measure(browser: Browser, url: str, repeats: int) -> tuple[float, float]:
    """Return the medians of first paint and first chart, in seconds."""
    paints: list[float] = []
    charts: list[float] = []
    for _ in range(repeats):
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(url)
        page.locator("canvas").first.wait_for()
        charts.append(page.evaluate(_CHART) / 1000)
        paints.append(page.evaluate(_PAINT) / 1000)
        page.close()
    return statistics.median(paints), statistics.median(charts)


if __name__ == "__main__":
    main()
