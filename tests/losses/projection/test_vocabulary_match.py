"""Ids that two vocabularies have in common, by bytes."""

import numpy as np
import pytest

from mopd_losses.projection.matrix import (
    ProjectionMatrix,
    ProjectionSettings,
    build_projection,
    identity_projection,
)
from mopd_losses.projection.vocabulary_match import VocabularyMatch, exact_match
from mopd_protocol.tokenizers.token_table import TokenRoles
from tests.losses.families import PAIRS, Family, family, family_of, made_of

DECAY = ProjectionSettings(weights="decay")


def projection(
    student: Family, teacher: Family, settings: ProjectionSettings = DECAY
) -> ProjectionMatrix:
    return build_projection(
        student.table, teacher.table, teacher.encoder,
        student_width=student.logit_width, settings=settings,
    )  # fmt: skip


def pairs(match: VocabularyMatch) -> dict[int, int]:
    """Student id -> teacher id."""
    return {v: j for j, v in enumerate(match.student_of.tolist()) if v >= 0}


@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize("settings", [DECAY, ProjectionSettings()])
def test_an_exact_match_pairs_equal_bytes_once_and_leaves_no_pair_out(
    names: tuple[str, str], settings: ProjectionSettings
) -> None:
    student, teacher = family(names[0]), family(names[1])
    match = exact_match(projection(student, teacher, settings), student.table, teacher.table)
    matched = pairs(match)
    for v, j in matched.items():
        assert student.table.all_bytes[v] == teacher.table.all_bytes[j]
    spelled = {b for b in student.table.all_bytes if b} & {b for b in teacher.table.all_bytes if b}
    assert {student.table.all_bytes[v] for v in matched if student.table.all_bytes[v]} == spelled
    assert matched[student.table.roles.ending[0]] in teacher.table.roles.ending
    assert match.pairs == len(matched)
    real = set(np.flatnonzero(student.table.real_ids(student.logit_width)).tolist())
    assert set(match.unmatched.nonzero().flatten().tolist()) == real - set(matched)


def test_a_vocabulary_matches_itself_whole() -> None:
    side = family("digit")
    matrix = identity_projection(side.table, logit_width=side.logit_width)
    match = exact_match(matrix, side.table, side.table)
    assert all(v == j for v, j in pairs(match).items())
    assert not match.unmatched.any()


@pytest.mark.parametrize("turn_first", [False, True])
def test_of_two_ending_tokens_the_one_that_ends_a_turn_is_matched(turn_first: bool) -> None:
    first, second = made_of("ab", end="<eos>"), made_of("ab", end="<eos>")
    second.tokenizer.add_special_tokens(["<turn>"])
    ids = [second.tokenizer.token_to_id(name) for name in ("<eos>", "<turn>")]
    eos, turn = reversed(ids) if turn_first else ids
    student = family_of(second.tokenizer, TokenRoles(eos=eos, end_of_turn=turn))
    match = exact_match(projection(student, first), student.table, first.table)
    assert pairs(match)[turn] == first.table.roles.end_of_turn
    assert match.unmatched[eos]
