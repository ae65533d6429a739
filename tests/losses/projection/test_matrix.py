"""The projection against its dense definition, and what must never again go wrong with it."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mopd_losses.config import CtkdConfig
from mopd_losses.projection.matrix import (
    ProjectionMatrix,
    ProjectionSettings,
    build_projection,
    identity_projection,
)
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_table import TokenRoles
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from tests.losses.families import PAIRS, Family, family, family_of, made_of
from tests.losses.permuted import permuted
from tests.reference.projection import dense_projection

FIRST = ProjectionSettings()
DECAY = ProjectionSettings(weights="decay")


def build(
    student: Family, teacher: Family, settings: ProjectionSettings = FIRST
) -> ProjectionMatrix:
    return build_projection(
        student.table,
        teacher.table,
        teacher.encoder,
        student_width=student.logit_width,
        settings=settings,
    )


def row(matrix: ProjectionMatrix, student_id: int) -> dict[int, float]:
    dense = matrix.dense()[student_id]
    return {int(j): float(dense[j]) for j in np.flatnonzero(dense)}


def only_id(side: Family, spelled: bytes) -> int:
    (token_id,) = [n for n, candidate in enumerate(side.table.all_bytes) if candidate == spelled]
    return token_id


@pytest.mark.parametrize("settings", [FIRST, DECAY], ids=["first", "decay"])
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_the_matrix_equals_its_dense_definition(
    student: str, teacher: str, settings: ProjectionSettings
) -> None:
    left, right = family(student), family(teacher)
    expected = dense_projection(
        left.table,
        right.table,
        right.encoder,
        student_width=left.logit_width,
        settings=settings,
    )
    np.testing.assert_allclose(build(left, right, settings).dense(), expected, atol=1e-7)


@pytest.mark.parametrize("name", ["digit", "whole_number", "sentencepiece"])
def test_one_tokenizer_on_both_sides_gives_the_identity(name: str) -> None:
    side = family(name)
    expected = np.zeros((side.logit_width, side.table.size))
    real = np.flatnonzero(side.table.present)
    expected[real, real] = 1
    assert (build(side, side).dense() == expected).all()
    assert (build(side, side, DECAY).dense() == expected).all()
    assert (identity_projection(side.table, logit_width=side.logit_width).dense() == expected).all()


@pytest.mark.parametrize("settings", [FIRST, DECAY], ids=["first", "decay"])
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_every_text_token_spreads_a_whole_and_padding_nothing(
    student: str, teacher: str, settings: ProjectionSettings
) -> None:
    left, right = family(student), family(teacher)
    matrix = build(left, right, settings)
    has_text = np.pad(left.table.byte_lengths > 0, (0, left.logit_width - left.table.size))
    np.testing.assert_allclose(matrix.row_sums[has_text], 1, atol=1e-6)
    assert (matrix.row_sums[left.table.size :] == 0).all()
    assert not set(range(left.table.size, left.logit_width)) & {*matrix.unprojected_ids.tolist()}
    assert (matrix.weights > 0).all()
    pairs = list(
        zip(
            matrix.student_ids.tolist(),
            np.repeat(np.arange(right.table.size), np.diff(matrix.column_starts)).tolist(),
            strict=True,
        )
    )
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_no_mass_is_lost_between_projected_and_unprojected(student: str, teacher: str) -> None:
    left, right = family(student), family(teacher)
    matrix = build(left, right, DECAY)
    p = np.random.default_rng(0).dirichlet(np.ones(left.logit_width)) * matrix.real_ids
    projected = p @ matrix.dense()
    assert projected.sum() + p[matrix.unprojected_ids].sum() == pytest.approx(p.sum(), abs=1e-7)
    assert (projected[matrix.unsupported_ids] == 0).all()
    assert (np.delete(projected, matrix.unsupported_ids) > 0).all()


@pytest.mark.parametrize("settings", [FIRST, DECAY], ids=["first", "decay"])
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_the_first_target_spells_the_beginning_of_the_token(
    student: str, teacher: str, settings: ProjectionSettings
) -> None:
    left, right = family(student), family(teacher)
    dense = build(left, right, settings).dense()
    known = set(right.table.all_bytes)
    for token_id, spelled in enumerate(left.table.all_bytes):
        if not spelled:
            continue
        target = right.table.bytes_of(int(dense[token_id].argmax()))
        assert target
        assert spelled.startswith(target)
        if spelled in known:
            assert target == spelled
            assert np.count_nonzero(dense[token_id]) == 1


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_an_end_of_turn_goes_whole_to_the_teachers_end_of_turn(student: str, teacher: str) -> None:
    left, right = family(student), family(teacher)
    assert left.table.roles.end_of_turn is not None
    assert row(build(left, right), left.table.roles.end_of_turn) == {
        right.table.roles.end_of_turn: 1.0
    }


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        ({"eos": 256, "end_of_turn": 257}, {"eos": 256, "end_of_turn": 257}, {256: 256, 257: 257}),
        ({"eos": 256, "end_of_turn": 257}, {"eos": 257, "end_of_turn": 256}, {256: 257, 257: 256}),
        ({"eos": 256, "end_of_turn": 257}, {"eos": 256, "end_of_turn": 256}, {256: 256, 257: 256}),
        ({"eos": 256, "end_of_turn": 256}, {"eos": 256, "end_of_turn": 257}, {256: 257}),
        ({"eos": 256, "end_of_turn": 257}, {"eos": 256}, {256: 256, 257: 256}),
        ({"eos": 256, "end_of_turn": 257}, {"end_of_turn": 257}, {256: 257, 257: 257}),
        ({"eos": 256}, {"end_of_turn": 257}, {256: 257}),
        ({"eos": 256, "end_of_turn": 257}, {}, {}),
    ],
)
def test_endings_match_by_role(
    student: dict[str, int], teacher: dict[str, int], expected: dict[int, int]
) -> None:
    def side(prefix: str, roles: dict[str, int]) -> Family:
        tokenizer = made_of("the").tokenizer  # 257 and 258 are the two endings
        tokenizer.add_special_tokens([f"<|{prefix}one|>", f"<|{prefix}two|>"])
        shift = tokenizer.token_to_id(f"<|{prefix}one|>") - 256
        return family_of(tokenizer, TokenRoles(**{k: v + shift for k, v in roles.items()}))

    left, right = side("s", student), side("t", teacher)
    shift = left.table.size - 2 - 256
    dense = build(left, right).dense()
    targets = {
        v - shift: int(dense[v].argmax()) - shift for v in left.table.roles.ending if dense[v].any()
    }
    assert targets == expected


def test_other_control_tokens_match_only_by_literal_name() -> None:
    left, right = family("digit"), family("whole_number")
    matrix = build(left, right)
    for name in ("<|system|>", "<|user|>", "<|assistant|>"):
        target = right.table.controls[name]
        assert row(matrix, left.table.controls[name]) == {target: 1.0}
    assert row(matrix, left.table.controls["<|pad|>"]) == {}
    assert left.table.controls["<|pad|>"] in matrix.unprojected_ids


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (1, [1.0]),
        (2, [0.9091, 0.0909]),
        (3, [0.9009, 0.0901, 0.0090]),
        (4, [0.9001, 0.0900, 0.0090, 0.0009]),
        (9, [0.9001, 0.0900, 0.0090, 0.0009]),
    ],
)
def test_decay_weights_are_the_published_ones(pieces: int, expected: list[float]) -> None:
    student = made_of("abcdefghi"[:pieces])
    teacher = made_of()
    token_id = only_id(student, b"abcdefghi"[:pieces])
    weights = row(build(student, teacher, DECAY), token_id)
    ids = [only_id(teacher, bytes([letter])) for letter in b"abcdefghi"[: len(expected)]]
    assert [weights[i] for i in ids] == pytest.approx(expected, abs=6e-5)
    assert len(weights) == len(expected)


@pytest.mark.parametrize("decay", [0.0, 1e-60, 1.0])
def test_extreme_decays_still_give_rows_that_sum_to_one(decay: float) -> None:
    student, teacher = made_of("abcd"), made_of()
    matrix = build(student, teacher, ProjectionSettings(weights="decay", decay=decay))
    row_weights = row(matrix, only_id(student, b"abcd"))
    assert sum(row_weights.values()) == pytest.approx(1)
    assert len(row_weights) == (4 if decay == 1 else 1)


def test_a_piece_that_comes_twice_gets_both_weights() -> None:
    student, teacher = made_of("aba"), made_of()
    weights = row(build(student, teacher, DECAY), only_id(student, b"aba"))
    assert weights == {
        ord("a"): pytest.approx((0.9 + 0.009) / 0.999),
        ord("b"): pytest.approx(0.09 / 0.999),
    }


def test_the_first_piece_is_the_teachers_own_and_not_the_longest() -> None:
    # The teacher merges "bc" before anything else, so that it never writes "ab" in "abc".
    student, teacher = made_of("abc"), made_of("bc", "ab")
    weights = row(build(student, teacher), only_id(student, b"abc"))
    assert weights == {only_id(teacher, b"a"): 1.0}


def test_a_token_with_a_leading_space_does_not_share_a_target_with_one_without() -> None:
    student, teacher = made_of("的", " 的"), made_of("的", " 的")
    teacher = permuted(teacher, seed=1)
    matrix = build(student, teacher)
    for spelled in ("的".encode(), " 的".encode()):
        assert row(matrix, only_id(student, spelled)) == {only_id(teacher, spelled): 1.0}


@pytest.mark.parametrize("settings", [FIRST, DECAY], ids=["first", "decay"])
def test_a_leading_space_is_the_first_piece_where_the_teacher_has_no_such_token(
    settings: ProjectionSettings,
) -> None:
    student, teacher = made_of("的", " 的"), made_of("的")
    weights = row(build(student, teacher, settings), only_id(student, " 的".encode()))
    assert max(weights, key=weights.__getitem__) == only_id(teacher, b" ")


@pytest.mark.parametrize("teacher", ["digit", "whole_number", "sentencepiece"])
@pytest.mark.parametrize("student", ["digit", "whole_number"])
def test_ids_that_decode_to_a_replacement_character_keep_their_own_bytes(
    student: str, teacher: str
) -> None:
    left, right = family(student), family(teacher)
    matrix = build(left, right)
    broken = [
        token_id
        for token_id, spelled in enumerate(left.table.all_bytes)
        if left.tokenizer.decode([token_id]) == "\ufffd" and spelled != b"\xef\xbf\xbd"
    ]
    assert len(broken) > 100
    targets: dict[int, bytes] = {}
    for token_id in broken:
        spelled = left.table.bytes_of(token_id)
        (target,) = row(matrix, token_id)
        assert spelled.startswith(right.table.bytes_of(target))
        if len(spelled) == 1:
            assert right.table.bytes_of(target) == spelled
            assert target not in targets
            targets[target] = spelled


def test_half_a_character_is_spelled_by_the_longest_pieces_that_fit() -> None:
    student = made_of("的")  # e7 9a 84, and e7 9a on the way
    teacher = made_of()
    half = only_id(student, b"\xe7\x9a")
    assert set(row(build(student, teacher, DECAY), half)) == {0xE7, 0x9A}
    assert row(build(student, student, DECAY), half) == {half: 1.0}
    other = made_of("的", "another")
    assert row(build(student, other), half) == {only_id(other, b"\xe7\x9a"): 1.0}


def test_of_two_teacher_ids_with_the_same_bytes_the_one_that_is_written_is_chosen() -> None:
    left, right = family("digit"), family("sentencepiece")
    matrix = build(left, right)
    as_byte, as_letter = (right.tokenizer.token_to_id(name) for name in ("<0x61>", "a"))
    assert as_byte < as_letter
    assert row(matrix, only_id(left, b"a")) == {as_letter: 1.0}
    assert as_byte in matrix.unsupported_ids


def test_text_that_the_teachers_normalizer_would_change_keeps_its_bytes() -> None:
    student, teacher = made_of("e\u0301"), family("whole_number")  # the teacher writes NFC
    weights = row(build(student, teacher), only_id(student, "e\u0301".encode()))
    (target,) = weights
    assert target == only_id(teacher, b"e")


@pytest.mark.parametrize("settings", [FIRST, DECAY], ids=["first", "decay"])
def test_permuting_a_vocabulary_permutes_the_matrix(settings: ProjectionSettings) -> None:
    left, right = family("whole_number"), family("digit")
    new_left, new_right = permuted(left, seed=3), permuted(right, seed=4)
    rows = [new_left.tokenizer.token_to_id(t) for t in tokens(left)]
    columns = [new_right.tokenizer.token_to_id(t) for t in tokens(right)]
    assert rows != list(range(len(rows)))
    expected = build(left, right, settings).dense()[: len(rows)]
    dense = build(new_left, new_right, settings).dense()[: len(rows)]
    np.testing.assert_array_equal(dense[np.ix_(rows, columns)], expected)


def tokens(side: Family) -> list[str]:
    names = [side.tokenizer.id_to_token(token_id) for token_id in range(side.table.size)]
    return [name for name in names if name is not None]


@pytest.mark.parametrize("padding", [0, 1, 100])
def test_each_side_keeps_its_own_size(padding: int) -> None:
    left, right = family("digit"), family("sentencepiece")
    matrix = build_projection(
        left.table, right.table, right.encoder, student_width=left.table.size + padding
    )
    assert matrix.dense().shape == (left.table.size + padding, right.table.size)
    assert matrix.real_ids.tolist() == [True] * left.table.size + [False] * padding
    back = build_projection(right.table, left.table, left.encoder, student_width=900)
    assert back.dense().shape == (900, left.table.size)


def test_a_head_narrower_than_its_tokenizer_is_refused() -> None:
    left, right = family("digit"), family("sentencepiece")
    with pytest.raises(DataError, match="head of 10 rows"):
        build_projection(left.table, right.table, right.encoder, student_width=10)
    with pytest.raises(DataError, match="head of 10 rows"):
        identity_projection(left.table, logit_width=10)


def test_holes_in_the_numbering_are_neither_rows_nor_columns() -> None:
    description = tokenizer_json(made_of("the").tokenizer)
    vocabulary = description["model"]["vocab"]
    description["model"]["vocab"] = {name: 2 * token for name, token in vocabulary.items()}
    side = permuted(made_of("the"), ids={old: 2 * old for old in vocabulary.values()})
    other = made_of("the", "then")
    for matrix, holes in (
        (build(side, other), lambda m: m.row_sums[: side.table.size]),
        (build(other, side), lambda m: m.dense().sum(axis=0)),
    ):
        assert (holes(matrix)[1::2] == 0).all()
    assert not build(side, other).real_ids[1::2].any()


def test_the_builder_is_deterministic() -> None:
    left, right = family("digit"), family("sentencepiece")
    assert build(left, right, DECAY).key == build(left, right, DECAY).key
    assert build(left, right, DECAY).key != build(left, right, FIRST).key


@given(
    broken=st.sampled_from(
        [
            {"student_ids": [0, 9]},
            {"student_ids": [0, -1]},
            {"student_ids": [0]},
            {"weights": [1.0, 0.5]},
            {"weights": [1.0, float("nan")]},
            {"weights": [2.0, -1.0], "student_ids": [0, 0]},
            {"column_starts": [0, 1]},
            {"column_starts": []},
            {"column_starts": [0, 2, 1, 2]},
            {"column_starts": [1, 1, 1, 2]},
            {"column_starts": [0, 1, 1, 3]},
            {"real_ids": [True]},
        ]
    )
)
@hypothesis_settings(deadline=None)
def test_arrays_that_contradict_each_other_are_refused(broken: dict[str, list[float]]) -> None:
    sound = {
        "column_starts": np.array([0, 1, 1, 2]),
        "student_ids": np.array([0, 1]),
        "weights": np.array([1.0, 1.0]),
        "real_ids": np.array([True, True]),
    }
    names = {"student_fingerprint": "s", "teacher_fingerprint": "t"}
    sizes = {"student_width": 2, "teacher_size": 3, "settings": FIRST}
    assert ProjectionMatrix(**names, **sizes, **sound).row_sums.tolist() == [1, 1]
    arrays = sound | {name: np.array(values) for name, values in broken.items()}
    with pytest.raises(DataError):
        ProjectionMatrix(**names, **sizes, **arrays)


@pytest.mark.parametrize(
    "wrong",
    [{"decay": -0.1}, {"max_length": 0}, {"weights": "last"}, {"gamma": 1}],
)
def test_impossible_settings_are_refused(wrong: dict[str, Literal[0]]) -> None:
    with pytest.raises(ValidationError):
        ProjectionSettings(**wrong)


@pytest.mark.parametrize("name", ["decay", "max_length"])
def test_what_only_decay_reads_is_refused_without_it(name: str) -> None:
    for settings in (ProjectionSettings, lambda **keywords: CtkdConfig(projection=keywords)):
        with pytest.raises(ValidationError, match=f"{name} set, but projection weights 'first'"):
            settings(**{name: 3})
        settings(**{name: 3, "weights": "decay"})
