"""Plant one fault at a time in a copy of the repository and run the tests that must catch it.

Test runs are forked from one process that has imported the large libraries.

`make mutants` (`python -m tests.mutants`) prints `caught / total` and exits with status 1 if a
fault survives. `-k PATTERN` selects faults by id, `--jobs 2` runs two at a time, `--baseline` first
runs the selected tests without a fault. The faults are listed in `tests/mutants.toml`.
"""

# ruff: noqa: T201

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants.toml"
IMPORT_FOLDERS = ("", "protocol", "server", "client", "losses", "trainer")
# The tests that each tier runs, as a mark expression (see the Makefile).
TIERS = {
    "test": "smoke or not (process or slow or vllm or nightly or packaging or gpu or npu or doors)",
    "test-all": "not (nightly or packaging or gpu or npu or doors)",
}
# Only ends a test that hangs because of its fault.
TIMEOUT_SECONDS = 240
OUTPUT = "mutants-output.txt"


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


def preload() -> None:
    """Import the large libraries once; every forked test run shares them."""
    for name in ("torch", "hypothesis", "httpx", "fastapi", "tokenizers", "beartype"):
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    for name in ("Qwen3ForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM"):
        getattr(transformers, name)


def start_tests(folder: Path, tests: Sequence[str], tier: str, output: Path) -> int:
    """Fork a process that runs tests of a tier in a copy; return its process id."""
    command = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
    command += ["-o", "addopts=", "--timeout", str(TIMEOUT_SECONDS), "-m", TIERS[tier], *tests]
    process = os.fork()
    if process:
        return process
    try:
        with output.open("wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.setsid()
        os.chdir(folder)
        paths = [str(folder / name) for name in IMPORT_FOLDERS]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        originals = {str(ROOT / name).rstrip("/") for name in IMPORT_FOLDERS} | {""}
        sys.path[:] = paths + [path for path in sys.path if path not in originals]
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "mopd")]:
            del sys.modules[name]
        status = int(pytest.main(command))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        status = 3
    os._exit(status)


def wait_for(process: int) -> int:
    """Return a test run's exit status, and end all processes that the run has left."""
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


@dataclass(frozen=True)
class Run:
    """A fault that is being tested in a copy."""

    mutant: Mutant
    folder: Path
    source: str
    started: float


def start_mutant(mutant: Mutant, folder: Path) -> tuple[int, Run]:
    """Plant the fault in a copy and start its tests."""
    path = folder / mutant.file
    source = path.read_text()
    path.write_text(mutant.apply(source))
    process = start_tests(folder, mutant.tests, mutant.tier, folder / OUTPUT)
    return process, Run(mutant, folder, source, time.monotonic())


def finish_mutant(run: Run, status: int) -> str:
    """Restore the file and print the outcome: `caught`, `survived` or `broken` (no tests ran)."""
    (run.folder / run.mutant.file).write_text(run.source)
    # A negative status is a signal: the fault crashed the process.
    outcome = "survived" if status == 0 else "caught" if status == 1 or status < 0 else "broken"
    seconds = time.monotonic() - run.started
    print(f"{outcome:9} {run.mutant.id} ({seconds:.0f} s)", flush=True)
    if outcome != "caught":
        print(last_lines(run.folder / OUTPUT), flush=True)
    return outcome


def last_lines(path: Path) -> str:
    """Return the end of a test run's output."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-4:])


def run_mutants(mutants: Sequence[Mutant], folders: Sequence[Path]) -> dict[str, str]:
    """Test the faults, one at a time in each copy; return the outcome of each."""
    free = list(folders)
    waiting = list(reversed(mutants))
    running: dict[int, Run] = {}
    outcomes: dict[str, str] = {}
    while waiting or running:
        while waiting and free:
            process, run = start_mutant(waiting.pop(), free.pop())
            running[process] = run
        process = next(iter(running))
        if len(running) > 1:
            process = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
        run = running.pop(process)
        outcomes[run.mutant.id] = finish_mutant(run, wait_for(process))
        free.append(run.folder)
    return outcomes


def run_baseline(mutants: Sequence[Mutant], folder: Path) -> bool:
    """Run all tests of the selected faults without a fault; return whether they pass."""
    passed = True
    for tier in TIERS:
        tests = sorted({name for mutant in mutants if mutant.tier == tier for name in mutant.tests})
        if tests:
            status = wait_for(start_tests(folder, tests, tier, folder / OUTPUT))
            print(f"baseline of {tier}: exit status {status}\n{last_lines(folder / OUTPUT)}")
            passed &= status == 0
    return passed


def main(arguments: list[str] | None = None) -> int:
    """Run the selected faults and print how many the tests catch."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-k", default="", metavar="PATTERN", help="only faults whose id matches")
    parser.add_argument("--tier", choices=TIERS, help="only faults of this tier")
    parser.add_argument("--jobs", type=int, default=1, help="faults tested at the same time")
    parser.add_argument("--baseline", action="store_true", help="first run the unchanged tests")
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in load_mutants()
        if re.search(options.k, mutant.id) and options.tier in (None, mutant.tier)
    ]
    preload()
    with tempfile.TemporaryDirectory(prefix="mopd-mutants-") as temporary:
        folders = [copy_tree(Path(temporary) / str(number)) for number in range(options.jobs)]
        if options.baseline and not run_baseline(mutants, folders[0]):
            return 1
        outcomes = run_mutants(mutants, folders)
    caught = sum(outcome == "caught" for outcome in outcomes.values())
    print(f"{caught} / {len(mutants)} caught")
    for name, outcome in outcomes.items():
        if outcome != "caught":
            print(f"{outcome}: {name}")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
