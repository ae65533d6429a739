"""Speed of projection and alignment on published vocabularies, compared with simple baselines.

Each figure is the median of several runs, each in a fresh process: neighbours on a shared
machine make single runs differ by tens of per cent. Peak memory is that of the whole process.
"""

import argparse
import difflib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from mopd_losses import align, build_projection
from mopd_protocol import TextEncoder, TokenRoles, TokenSequence, TokenTable

ROOT = Path(__file__).parents[1]
VOCABULARIES = ("tekken", "tekken_shuffled", "python_131k", "python_50k", "v3")
PROJECTED = [
    ("tekken", "tekken_shuffled"),
    ("tekken", "python_131k"),
    ("python_131k", "tekken"),
    ("tekken", "v3"),
    ("v3", "tekken"),
    ("tekken", "python_50k"),
    ("python_50k", "tekken"),
]
ALIGNED = [("tekken", "v3"), ("tekken", "python_50k"), ("python_50k", "v3")]
#: Characters of a text that the baselines process; difflib is quadratic.
PEER_CHARACTERS = 2_000

Result = dict[str, Any]


def main() -> None:
    """Measure, print the tables and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="fresh processes a figure (default: 3)")
    parser.add_argument("--json", type=Path, help="write every run's figures to this file")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # in a child process
    options = parser.parse_args()
    if options.measure:
        what, folder, student, teacher = options.measure
        measured = MEASUREMENTS[what](Path(folder), student, teacher)
        sys.stdout.write(json.dumps(measured))
        return
    console = Console()
    with TemporaryDirectory() as folder:
        _write_material(Path(folder))
        results = {
            what: [
                _median_of_runs(what, Path(folder), pair, options.runs)
                for pair in track(pairs, what, console=console, transient=True)
            ]
            for what, pairs in (("projection", PROJECTED), ("alignment", ALIGNED))
        }
    console.print(
        _projection_table(results["projection"]),
        _alignment_table(results["alignment"]),
        _baseline_table(results["alignment"]),
    )
    if options.json:
        machine = {"processor": platform.processor(), "cores": os.cpu_count(), "runs": options.runs}
        options.json.write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n")


def measure_projection(folder: Path, student: str, teacher: str) -> Result:
    """Measure a projection built from two ``tokenizer.json``, and one from decoded strings."""
    started = time.perf_counter()
    left, right = _tokenizer(folder, student), _tokenizer(folder, teacher)
    loaded = time.perf_counter()
    student_table = TokenTable.from_tokenizer(left, _roles(folder, student))
    teacher_table = TokenTable.from_tokenizer(right, _roles(folder, teacher))
    encoder = TextEncoder(right, teacher_table)
    read = time.perf_counter()
    matrix = build_projection(
        student_table, teacher_table, encoder, student_width=student_table.size
    )
    built = time.perf_counter()
    peak = _peak_megabytes()
    rows, peer_seconds = _timed(lambda: _rows_from_decoded_strings(left, right))
    known = {*teacher_table.all_bytes}
    text = [spelled for spelled in student_table.all_bytes if spelled]
    return {
        "sizes": [student_table.size, teacher_table.size],
        "load_seconds": loaded - started,
        "tables_seconds": read - loaded,
        "build_seconds": built - read,
        "peak_megabytes": peak,
        "same_bytes_share": sum(spelled in known for spelled in text) / len(text),
        "unprojected_text": sum(
            int(student_table.byte_lengths[token_id]) > 0
            for token_id in matrix.unprojected_ids.tolist()
            if token_id < student_table.size
        ),
        "peer_seconds": peer_seconds,
        "peer_wrong_rows": _rows_with_wrong_first_bytes(rows, student_table, teacher_table),
        "text_rows": len(text),
    }


def measure_alignment(folder: Path, student: str, teacher: str) -> Result:
    """Measure ``align`` on complete texts, and the baselines on their first tokens."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sides = [_tokenizer(folder, name) for name in (student, teacher)]
    tables = [TokenTable.from_tokenizer(side) for side in sides]
    encoders = [TextEncoder(*pair) for pair in zip(sides, tables, strict=True)]
    results: Result = {}
    for text_name in ("code", "mixed", "digits", "edited"):
        texts = [
            (folder / f"{text_name}.{side}.txt").read_bytes().decode()
            for side in ("student", "teacher")
        ]
        ids = [encoder.encode(text) for encoder, text in zip(encoders, texts, strict=True)]
        left, right = (table.sequence(i) for table, i in zip(tables, ids, strict=True))
        before = _peak_megabytes()
        alignment, seconds = _timed(lambda left=left, right=right: align(left, right))
        _, table_seconds = _timed(lambda ids=ids: tables[0].sequence(ids[0]))
        results[text_name] = {
            "tokens": [len(left), len(right)],
            "tokens_per_second": len(left) / seconds,
            "bytes_table_tokens_per_second": len(left) / table_seconds,
            "aligned_share": alignment.aligned_bytes(left) / len(left.text),
            "one_to_one_share": float(alignment.one_to_one.mean()),
            "grown_megabytes": _peak_megabytes() - before,
            **_baselines(sides, tables, texts),
        }
    return results


def _baselines(
    sides: Sequence[Tokenizer], tables: Sequence[TokenTable], texts: Sequence[str]
) -> Result:
    """Measure a Python loop and difflib over decoded tokens, on the start of the text."""
    text = texts[0][:PEER_CHARACTERS]
    ids = [TextEncoder(s, t).encode(text) for s, t in zip(sides, tables, strict=True)]
    left, right = (table.sequence(i) for table, i in zip(tables, ids, strict=True))
    alignment, seconds = _timed(lambda: align(left, right))
    walked, walk_seconds = _timed(lambda: _walk(left, right))
    assert walked == len(alignment)
    matched, difflib_seconds = _timed(lambda: _matched_by_difflib(sides, ids))
    lengths = tables[0].byte_lengths[ids[0]]
    return {
        "peer_tokens": len(left),
        "peer_align_tokens_per_second": len(left) / seconds,
        "peer_align_aligned_share": alignment.aligned_bytes(left) / len(left.text),
        "walk_tokens_per_second": len(left) / walk_seconds,
        "difflib_tokens_per_second": len(left) / difflib_seconds,
        "difflib_aligned_share": float(lengths[matched].sum() / lengths.sum()),
    }


def _walk(left: TokenSequence, right: TokenSequence) -> int:
    """Count spans with two pointers in plain Python."""
    ends, teacher_ends = left.byte_ends.tolist(), right.byte_ends.tolist()
    spans = at = other = 0
    while at < len(ends) and other < len(teacher_ends):
        if ends[at] == teacher_ends[other]:
            spans, at, other = spans + 1, at + 1, other + 1
        elif ends[at] < teacher_ends[other]:
            at += 1
        else:
            other += 1
    return spans


def _matched_by_difflib(sides: Sequence[Tokenizer], ids: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions of student tokens whose decoded strings difflib matches."""
    left, right = ([s.decode([i]) for i in sent] for s, sent in zip(sides, ids, strict=True))
    blocks = difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return [block.a + n for block in blocks for n in range(block.size)]


def _rows_from_decoded_strings(student: Tokenizer, teacher: Tokenizer) -> dict[int, int]:
    """Map student ids to the teacher id of the greatest weight, from decoded strings.

    X-Token's forward pass and exact overwrite (arXiv 2605.21699): every student token is decoded
    and encoded again one at a time, and equal surfaces take precedence.
    """
    surfaces = teacher.get_vocab()
    rows: dict[int, int] = {}
    for token_id in range(student.get_vocab_size()):
        pieces = teacher.encode(student.decode([token_id]), add_special_tokens=False).ids[:4]
        surface = student.id_to_token(token_id)
        if surface in surfaces:
            rows[token_id] = surfaces[surface]
        elif pieces:
            rows[token_id] = pieces[0]
    return rows


def _rows_with_wrong_first_bytes(
    rows: dict[int, int], student: TokenTable, teacher: TokenTable
) -> int:
    """Count student tokens with bytes that do not start with the bytes of their first target."""
    teacher_bytes = teacher.all_bytes
    return sum(
        token_id not in rows
        or not teacher_bytes[rows[token_id]]
        or not spelled.startswith(teacher_bytes[rows[token_id]])
        for token_id, spelled in enumerate(student.all_bytes)
        if spelled
    )


def _write_material(folder: Path) -> None:
    """Save the tokenizers with their roles, and the texts of both sides."""
    from tests.real_vocabularies import (
        MIXED_TEXT,
        STANDARD_LIBRARY,
        python_sources,
        tokenizer_and_roles,
    )

    for name in VOCABULARIES:
        tokenizer, roles = tokenizer_and_roles(name)
        tokenizer.save(_file(folder, name))
        (folder / f"{name}.roles").write_text(roles.model_dump_json())
    sources = python_sources(STANDARD_LIBRARY)[::20]
    code = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
    code = code[:1_000_000]
    lines = code.splitlines(keepends=True)
    edited = "".join(f"#{line}" if n % 100 == 99 else line for n, line in enumerate(lines))
    for name, student, teacher in (
        ("code", code, code),
        ("mixed", MIXED_TEXT * 500, MIXED_TEXT * 500),
        ("digits", "7" * 100_000, "7" * 100_000),
        ("edited", code, edited),
    ):
        (folder / f"{name}.student.txt").write_bytes(student.encode())
        (folder / f"{name}.teacher.txt").write_bytes(teacher.encode())


def _median_of_runs(what: str, folder: Path, pair: tuple[str, str], runs: int) -> Result:
    command = [sys.executable, "-m", "bench.vocabularies", "--measure", what, str(folder), *pair]
    runs_of_pair = [
        json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(runs)
    ]
    return {
        "student": pair[0],
        "teacher": pair[1],
        "median": _median(runs_of_pair),
        "runs": runs_of_pair,
    }


def _median(values: Sequence[Any]) -> Any:
    """Return the medians of corresponding values in nested results."""
    if isinstance(values[0], dict):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], list):
        return [_median(column) for column in zip(*values, strict=True)]
    return statistics.median(values)


def _projection_table(results: Sequence[Result]) -> Table:
    table = _table(
        "projection of one vocabulary to another",
        ["student → teacher", "read", "build", "peak MB", "same", "strings", "wrong rows"],
    )
    for result in results:
        median = result["median"]
        table.add_row(
            _pair(result),
            f"{median['load_seconds'] + median['tables_seconds']:.2f}",
            f"{median['build_seconds']:.2f}",
            f"{median['peak_megabytes']:,.0f}",
            f"{median['same_bytes_share']:.1%}",
            f"{median['peer_seconds']:.2f}",
            f"{median['peer_wrong_rows'] / median['text_rows']:.1%}",
        )
    return table


def _alignment_table(results: Sequence[Result]) -> Table:
    table = _table(
        "alignment of whole texts",
        ["student → teacher", "text", "tokens", "M tokens/s", "bytes aligned", "1-1 spans"],
    )
    for result in results:
        for text, median in result["median"].items():
            table.add_row(
                _pair(result),
                text,
                f"{median['tokens'][0]:,.0f}",
                f"{median['tokens_per_second'] / 1e6:.2f}",
                f"{median['aligned_share']:.2%}",
                f"{median['one_to_one_share']:.1%}",
            )
    return table


def _baseline_table(results: Sequence[Result]) -> Table:
    table = _table(
        f"alignment of the first {PEER_CHARACTERS:,} characters, M tokens/s",
        ["student → teacher", "text", "align", "walk", "difflib", "bytes"],
    )
    for result in results:
        for text, median in result["median"].items():
            table.add_row(
                _pair(result),
                text,
                f"{median['peer_align_tokens_per_second'] / 1e6:.2f}",
                f"{median['walk_tokens_per_second'] / 1e6:.2f}",
                f"{median['difflib_tokens_per_second'] / 1e6:.3f}",
                f"{median['difflib_aligned_share']:.1%}",
            )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        is_name = name in ("student → teacher", "text")
        table.add_column(name, justify="left" if is_name else "right", no_wrap=True)
    return table


def _pair(result: Result) -> str:
    return f"{result['student']} → {result['teacher']}"


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    value = call()
    return value, time.perf_counter() - started


def _peak_megabytes() -> float:
    """Return the peak memory of this process since its start."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


def _file(folder: Path, name: str) -> str:
    return str(folder / f"{name}.json")


def _tokenizer(folder: Path, name: str) -> Tokenizer:
    return Tokenizer.from_file(_file(folder, name))


def _roles(folder: Path, name: str) -> TokenRoles:
    return TokenRoles.model_validate_json((folder / f"{name}.roles").read_text())


MEASUREMENTS = {"projection": measure_projection, "alignment": measure_alignment}

if __name__ == "__main__":
    main()
