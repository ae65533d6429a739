"""Plant one fault at a time in a copy of the repository and run the tests that must catch it.

`make mutants` (`python -m tests.mutants`) prints `caught / total` and exits with status 1 if a
fault survives. `-k TEXT` selects faults by id, `--jobs 2` runs two at a time, `--baseline` first
runs the selected tests without a fault. The faults are listed in `tests/mutants.toml`.
"""

# ruff: noqa: T201

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants.toml"
IMPORT_FOLDERS = ("", "protocol", "server", "client", "losses", "trainer")
# The tests that each tier runs, as a mark expression.
TIERS = {
    "test": "not process and not slow and not vllm and not packaging and not gpu and not npu",
    "test-all": "not packaging and not gpu and not npu",
}
# Only ends a run that hangs because of its fault.
TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` in `file` becomes `new`, and the `tests` of the `tier` must fail."""

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    tier: str = "test"

    def apply(self, source: str) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: if `old` does not occur exactly once.
        """
        pattern = r"\s+".join(re.escape(part) for part in self.old.split())
        count = len(re.findall(pattern, source))
        if count != 1:
            raise ValueError(
                f"mutant {self.id}: {self.old!r} in {self.file} (found {count} times, expected 1). "
                "Update tests/mutants.toml."
            )
        return re.sub(pattern, lambda _: self.new, source)


def load_mutants() -> list[Mutant]:
    """Load the table of faults."""
    entries = tomllib.loads(TABLE.read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copy_tree(folder: Path) -> Path:
    """Copy all files of the working tree that git does not ignore."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout.decode()
    for name in names.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(folder: Path, tests: Sequence[str], tier: str) -> tuple[int, str]:
    """Run tests of a tier in a copy; return pytest's exit status and the end of its output."""
    paths = os.pathsep.join(str(folder / name) for name in IMPORT_FOLDERS)
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-o", "addopts=", "-p", "no:xdist", "-m", TIERS[tier], *tests]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no result after {TIMEOUT_SECONDS} s"
    return done.returncode, "\n".join(done.stdout.decode(errors="replace").splitlines()[-4:])


def run_mutant(mutant: Mutant, copies: "SimpleQueue[Path]") -> tuple[str, str]:
    """Plant the fault in a copy, run its tests and restore the file.

    Returns `caught`, `survived` or `broken` (the tests could not be run), and the last lines.
    """
    folder = copies.get()
    path = folder / mutant.file
    source = path.read_text()
    started = time.monotonic()
    try:
        path.write_text(mutant.apply(source))
        status, output = run_tests(folder, mutant.tests, mutant.tier)
    finally:
        path.write_text(source)
        copies.put(folder)
    outcome = {0: "survived", 1: "caught"}.get(status, "broken")
    print(f"{outcome:9} {mutant.id} ({time.monotonic() - started:.0f} s)", flush=True)
    if outcome != "caught":
        print(output, flush=True)
    return outcome, output


def run_baseline(mutants: Sequence[Mutant], copies: "SimpleQueue[Path]") -> bool:
    """Run all tests of the selected faults without a fault; return whether they pass."""
    folder = copies.get()
    passed = True
    for tier in TIERS:
        tests = sorted({name for mutant in mutants if mutant.tier == tier for name in mutant.tests})
        if tests:
            status, output = run_tests(folder, tests, tier)
            print(f"baseline of {tier}: exit status {status}\n{output}", flush=True)
            passed &= status == 0
    copies.put(folder)
    return passed


def main(arguments: list[str] | None = None) -> int:
    """Run the selected faults and print how many the tests catch."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="only faults whose id contains it")
    parser.add_argument("--tier", choices=TIERS, help="only faults of this tier")
    parser.add_argument("--jobs", type=int, default=1, help="faults tested at the same time")
    parser.add_argument("--baseline", action="store_true", help="first run the unchanged tests")
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in load_mutants()
        if options.k in mutant.id and options.tier in (None, mutant.tier)
    ]
    with tempfile.TemporaryDirectory(prefix="mopd-mutants-") as temporary:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(copy_tree(Path(temporary) / str(number)))
        if options.baseline and not run_baseline(mutants, copies):
            return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(lambda mutant: run_mutant(mutant, copies), mutants))
    caught = sum(outcome == "caught" for outcome, _ in outcomes)
    print(f"{caught} / {len(mutants)} caught")
    for mutant, (outcome, _) in zip(mutants, outcomes, strict=True):
        if outcome != "caught":
            print(f"{outcome}: {mutant.id}")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
