"""How fast published vocabularies are projected and aligned, beside the obvious slower ways.

Each figure is the median of several runs, every one in a fresh process: neighbours on a shared
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

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.projection.matrix import build_projection
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenRoles, TokenTable

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
#: What the slower ways get of a text; difflib is quadratic.
PEER_CHARACTERS = 2_000

Result = dict[str, Any]


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="fresh processes a figure (default: 3)")
    parser.add_argument("--json", type=Path, help="write every run's figures to this file")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # what a child does
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
        _slower_table(results["alignment"]),
    )
    if options.json:
        machine = {"processor": platform.processor(), "cores": os.cpu_count(), "runs": options.runs}
        options.json.write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n")


def measure_projection(folder: Path, student: str, teacher: str) -> Result:
    """From two ``tokenizer.json`` to a projection, then the same out of decoded strings."""
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
        "peer_wrong_rows": _rows_that_begin_otherwise(rows, student_table, teacher_table),
        "text_rows": len(text),
    }


def measure_alignment(folder: Path, student: str, teacher: str) -> Result:
    """Whole texts through ``align``, and their first tokens through the slower ways."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sides = [_tokenizer(folder, name) for name in (student, teacher)]
    tables = [TokenTable.from_tokenizer(side) for side in sides]
    encoders = [TextEncoder(*pair) for pair in zip(sides, tables, strict=True)]
    found: Result = {}
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
        found[text_name] = {
            "tokens": [len(left), len(right)],
            "tokens_per_second": len(left) / seconds,
            "bytes_table_tokens_per_second": len(left) / table_seconds,
            "aligned_share": alignment.aligned_bytes(left) / len(left.text),
            "one_to_one_share": float(alignment.one_to_one.mean()),
            "grown_megabytes": _peak_megabytes() - before,
            **_slower_ways(sides, tables, texts),
        }
    return found


def _slower_ways(
    sides: Sequence[Tokenizer], tables: Sequence[TokenTable], texts: Sequence[str]
) -> Result:
    """A walk in Python and difflib over decoded tokens, on the beginning of the student's text."""
    text = texts[0][:PEER_CHARACTERS]
    ids = [TextEncoder(s, t).encode(text) for s, t in zip(sides, tables, strict=True)]
    left, right = (table.sequence(i) for table, i in zip(tables, ids, strict=True))
    ours, seconds = _timed(lambda: align(left, right))
    walked, walk_seconds = _timed(lambda: _walk(left, right))
    assert walked == len(ours)
    matched, difflib_seconds = _timed(lambda: _matched_by_difflib(sides, ids))
    lengths = tables[0].byte_lengths[ids[0]]
    return {
        "peer_tokens": len(left),
        "peer_ours_tokens_per_second": len(left) / seconds,
        "peer_ours_aligned_share": ours.aligned_bytes(left) / len(left.text),
        "walk_tokens_per_second": len(left) / walk_seconds,
        "difflib_tokens_per_second": len(left) / difflib_seconds,
        "difflib_aligned_share": float(lengths[matched].sum() / lengths.sum()),
    }


def _walk(left: TokenSequence, right: TokenSequence) -> int:
    """Spans found by two pointers in plain Python."""
    ends, others = left.byte_ends.tolist(), right.byte_ends.tolist()
    spans = at = other = 0
    while at < len(ends) and other < len(others):
        if ends[at] == others[other]:
            spans, at, other = spans + 1, at + 1, other + 1
        elif ends[at] < others[other]:
            at += 1
        else:
            other += 1
    return spans


def _matched_by_difflib(sides: Sequence[Tokenizer], ids: Sequence[Sequence[int]]) -> list[int]:
    """Positions of student tokens whose decoded strings difflib matches."""
    left, right = ([s.decode([i]) for i in sent] for s, sent in zip(sides, ids, strict=True))
    blocks = difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return [block.a + n for block in blocks for n in range(block.size)]


def _rows_from_decoded_strings(student: Tokenizer, teacher: Tokenizer) -> dict[int, int]:
    """Student id -> teacher id of the greatest weight, by way of strings.

    X-Token's forward pass and exact overwrite (arXiv 2605.21699): every student token is decoded
    by itself and encoded again, and equal surfaces win.
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


def _rows_that_begin_otherwise(
    rows: dict[int, int], student: TokenTable, teacher: TokenTable
) -> int:
    """Student tokens with bytes whose first target's bytes are not what they begin with."""
    mine, theirs = student.all_bytes, teacher.all_bytes
    return sum(
        token_id not in rows
        or not theirs[rows[token_id]]
        or not spelled.startswith(theirs[rows[token_id]])
        for token_id, spelled in enumerate(mine)
        if spelled
    )


def _write_material(folder: Path) -> None:
    """Tokenizers as ``tokenizer.json`` with their roles, and texts for both sides."""
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
    answers = [
        json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(runs)
    ]
    return {"student": pair[0], "teacher": pair[1], "median": _median(answers), "runs": answers}


def _median(values: Sequence[Any]) -> Any:
    """Medians of equal places in nested results."""
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
        found = result["median"]
        table.add_row(
            _pair(result),
            f"{found['load_seconds'] + found['tables_seconds']:.2f}",
            f"{found['build_seconds']:.2f}",
            f"{found['peak_megabytes']:,.0f}",
            f"{found['same_bytes_share']:.1%}",
            f"{found['peer_seconds']:.2f}",
            f"{found['peer_wrong_rows'] / found['text_rows']:.1%}",
        )
    return table


def _alignment_table(results: Sequence[Result]) -> Table:
    table = _table(
        "alignment of whole texts",
        ["student → teacher", "text", "tokens", "M tokens/s", "bytes aligned", "1-1 spans"],
    )
    for result in results:
        for text, found in result["median"].items():
            table.add_row(
                _pair(result),
                text,
                f"{found['tokens'][0]:,.0f}",
                f"{found['tokens_per_second'] / 1e6:.2f}",
                f"{found['aligned_share']:.2%}",
                f"{found['one_to_one_share']:.1%}",
            )
    return table


def _slower_table(results: Sequence[Result]) -> Table:
    table = _table(
        f"alignment of the first {PEER_CHARACTERS:,} characters, M tokens/s",
        ["student → teacher", "text", "align", "walk", "difflib", "bytes"],
    )
    for result in results:
        for text, found in result["median"].items():
            table.add_row(
                _pair(result),
                text,
                f"{found['peer_ours_tokens_per_second'] / 1e6:.2f}",
                f"{found['walk_tokens_per_second'] / 1e6:.2f}",
                f"{found['difflib_tokens_per_second'] / 1e6:.3f}",
                f"{found['difflib_aligned_share']:.1%}",
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
    """Of this process since its start."""
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
