"""``mopd projection``: builds the matrix between two vocabularies, and looks into it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mopd_losses.config import ProjectionSettings
from mopd_losses.projection.cache import cache_key
from mopd_losses.projection.matrix import ProjectionMatrix, build_projection
from mopd_protocol.errors import ConfigError
from mopd_trainer.cli.projection_facts import Counts, Spelled, counts_of, spelled_of
from mopd_trainer.cli.tokenizer_argument import NamedTokenizer, read_tokenizer


def build(
    student_name: str,
    teacher_name: str,
    *,
    settings: ProjectionSettings,
    output: Path | None,
    api_key_env: str | None,
    console: Console,
) -> None:
    """Writes the projection and says what it covers.

    Raises:
        MopdError: when a tokenizer cannot be read or the file cannot be written.
    """
    student, teacher = _both(student_name, teacher_name, api_key_env)
    matrix = _built(student, teacher, settings)
    path = output or Path()
    if path.suffix != ".safetensors":
        key = cache_key(
            student.table, teacher.table, student_width=student.logit_width, settings=settings
        )
        path /= f"projection-{key}.safetensors"
    matrix.save(path)
    spelled = spelled_of(matrix, student.table, teacher.table, rows=0)
    console.print(_sides(student, teacher), _numbers(matrix, counts_of(matrix), spelled))
    console.print(Text(f"\nwritten to {path}, {path.stat().st_size:,} bytes"), soft_wrap=True)


def inspect(
    sources: Sequence[str],
    *,
    settings: ProjectionSettings,
    rows: int,
    as_json: bool,
    api_key_env: str | None,
    console: Console,
) -> None:
    """Prints what a projection covers and where it is poor.

    Args:
        sources: a projection file, or a student and a teacher, or all three.

    Raises:
        MopdError: when one of them cannot be read, or they do not belong together.
    """
    if len(sources) > 3:
        raise ConfigError(
            f"{len(sources)} things to inspect; expected FILE, or STUDENT TEACHER, or "
            "FILE STUDENT TEACHER"
        )
    if len(sources) == 2 and sources[0].endswith(".safetensors"):
        raise ConfigError(f"{sources[0]} with one tokenizer; expected both after it, or none")
    file = Path(sources[0]) if len(sources) != 2 else None
    matrix = ProjectionMatrix.load(file) if file else None
    student = teacher = spelled = None
    if len(sources) > 1:
        student, teacher = _both(sources[-2], sources[-1], api_key_env)
        if matrix is None:
            matrix = _built(student, teacher, settings)
        matrix.require(student.table.fingerprint, teacher.table.fingerprint)
        spelled = spelled_of(matrix, student.table, teacher.table, rows=rows)
    assert matrix is not None
    if as_json:
        sys.stdout.write(json.dumps(_plain(matrix, spelled), ensure_ascii=False) + "\n")
        return
    header = _sides(student, teacher) if student and teacher else _fingerprints(file, matrix)
    console.print(header, _numbers(matrix, counts_of(matrix), spelled))
    if spelled:
        console.print(_details(spelled, rows))
    else:
        console.print(
            "\n[dim]A file knows its tokenizers by fingerprint alone. Name them after it, as FILE "
            "STUDENT TEACHER, to read rows, control tokens and roles.[/]"
        )


def _both(
    student: str, teacher: str, api_key_env: str | None
) -> tuple[NamedTokenizer, NamedTokenizer]:
    return (
        read_tokenizer(student, api_key_env=api_key_env),
        read_tokenizer(teacher, api_key_env=api_key_env),
    )


def _built(
    student: NamedTokenizer, teacher: NamedTokenizer, settings: ProjectionSettings
) -> ProjectionMatrix:
    return build_projection(
        student.table,
        teacher.table,
        teacher.encoder,
        student_width=student.logit_width,
        settings=settings,
    )


def _plain(matrix: ProjectionMatrix, spelled: Spelled | None) -> dict[str, object]:
    return {
        "student_fingerprint": matrix.student_fingerprint,
        "teacher_fingerprint": matrix.teacher_fingerprint,
        "settings": matrix.settings.model_dump(),
        **asdict(counts_of(matrix)),
        "unprojected_ids": matrix.unprojected_ids.tolist(),
        "unsupported_ids": matrix.unsupported_ids.tolist(),
        "tokenizers": asdict(spelled) if spelled else None,
    }


def _sides(student: NamedTokenizer, teacher: NamedTokenizer) -> RenderableType:
    table = _columns()
    table.add_row("student", Text(student.summary))
    table.add_row("teacher", Text(teacher.summary))
    return table


def _fingerprints(file: Path | None, matrix: ProjectionMatrix) -> RenderableType:
    table = _columns()
    table.add_row("file", Text(str(file)))
    table.add_row("student", Text(f"tokenizer {matrix.student_fingerprint[:12]}"))
    table.add_row("teacher", Text(f"tokenizer {matrix.teacher_fingerprint[:12]}"))
    return table


def _numbers(matrix: ProjectionMatrix, counts: Counts, spelled: Spelled | None) -> RenderableType:
    settings = matrix.settings
    weights = "all on the first piece"
    if settings.weights == "decay":
        weights = f"on the first {settings.max_length} pieces, each {settings.decay:g} of the last"
    table = _columns()
    table.add_row("", "")
    table.add_row("weights", weights)
    table.add_row("student ids", _share(counts.projected, counts.student_ids, "projected"))
    if spelled:
        table.add_row(
            "", _share(spelled.same_bytes, spelled.text_ids, "text ids to the same bytes")
        )
    table.add_row("", _share(counts.one_hot, counts.projected, "projected to one teacher id"))
    table.add_row("", f"{counts.unprojected:,} without a target, left to the tail of a loss")
    table.add_row("teacher ids", _share(counts.reached, counts.teacher_ids, "reached"))
    unsupported = f"{counts.unsupported:,} out of the student's reach"
    if spelled:
        unsupported += f", {spelled.unsupported_text:,} of them text"
    table.add_row("", unsupported)
    table.add_row("", f"{counts.fed_by_several:,} reached from several student ids")
    if counts.most_fed_by > 1:
        name = (
            f"{spelled.most_fed} (id {counts.most_fed_id})"
            if spelled
            else f"id {counts.most_fed_id}"
        )
        table.add_row("", Text(f"{counts.most_fed_by:,} student ids at most, at {name}"))
    return table


def _details(spelled: Spelled, rows: int) -> RenderableType:
    parts: list[RenderableType] = [Text(""), _roles(spelled)]
    for title, names in (
        ("student tokens without a target", spelled.unprojected),
        ("teacher control tokens that nothing reaches", spelled.unsupported_controls),
    ):
        if names:
            more = " …" if len(names) == rows else ""
            parts += [Text(""), Text(title, style="bold"), Text("  ".join(names) + more)]
    if spelled.worst:
        parts += [Text(""), _worst(spelled)]
    return Group(*parts)


def _roles(spelled: Spelled) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("role", "student", "teacher", "student's goes to"):
        table.add_column(name, overflow="fold", header_style="bold", justify="left")
    for role in spelled.roles:
        lost = role.student is not None and role.target is None
        table.add_row(
            role.role,
            Text(role.student or "–"),
            Text(role.teacher or "–"),
            Text(role.target or ("nothing" if lost else "–"), style="yellow" if lost else ""),
        )
    named = f"{spelled.controls_projected:,} of {spelled.controls:,} have a counterpart"
    table.add_row("all controls", named)
    return table


def _worst(spelled: Spelled) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("student id", justify="right", header_style="bold")
    table.add_column("spells", overflow="fold", header_style="bold", max_width=34)
    table.add_column("goes to", overflow="fold", header_style="bold")
    table.add_column("first piece", justify="right", header_style="bold")
    for row in spelled.worst:
        targets = "  ".join(
            name if weight == 1 else f"{name} {weight:.4f}" for _, name, weight in row.targets
        )
        table.add_row(
            str(row.student_id), Text(row.spells), Text(targets), f"{row.first_share:.0%} of bytes"
        )
    return Group(
        Text("worst rows, whose first piece has the least of the token", style="bold"), table
    )


def _columns() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True, min_width=11)
    table.add_column(overflow="fold")
    return table


def _share(part: int, whole: int, what: str) -> str:
    return f"{part:,} of {whole:,} {what} ({part / whole:.2%})" if whole else f"0 {what}"
