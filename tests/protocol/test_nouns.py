"""The frozen values refuse what cannot be, with a sentence, and cannot be written to."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.arrays import frozen_array
from mopd_protocol.errors import ConfigError, DataError, MopdError, TeacherError
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import Message, Prompt, Rollout, TeacherScore
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

INF = float("inf")
NAN = float("nan")


def sequence(**changes: Any) -> TokenSequence:
    """``ab``, an end of turn."""
    fields = {"token_ids": [5, 6, 0], "byte_ends": [1, 2, 2], "text": b"ab"}
    return TokenSequence(**{**fields, "marks": {2: END_OF_TURN}, **changes})


def topk(**changes: Any) -> TopKLogprobs:
    """Two rows of at most two entries."""
    fields: dict[str, Any] = {
        "ids": [[3, 1], [4, -1]],
        "logprobs": [[-0.5, -1.5], [-0.1, -INF]],
        "token_logprobs": [-1.5, -7.0],
        "tail_logprobs": [-1.8, -2.4],
    }
    return TopKLogprobs(**{**fields, **changes})


def rollout(**changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "prompt": Prompt(0, (Message(role="user", content="?"),), {"math": 1.0}),
        "prompt_token_ids": [1, 2],
        "completion": sequence(),
        "sampled_logprobs": [-0.1, -0.2, -0.3],
        "finish_reason": "stop",
        "policy_version": 4,
    }
    return Rollout(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"byte_ends": [1, 2]}, "expected two vectors of one length"),
        ({"token_ids": [[5, 6, 0]], "byte_ends": [[1, 2, 2]]}, "expected two vectors"),
        ({"byte_ends": [2, 1, 2]}, "byte ends decrease along the sequence"),
        ({"byte_ends": [-1, 2, 2]}, "byte ends decrease along the sequence"),
        ({"text": b"abc"}, "end at byte 2 but the text has 3 bytes"),
        ({"token_ids": [], "byte_ends": [], "marks": {}}, "end at byte 0 but the text has 2 bytes"),
        ({"marks": {3: "x"}}, "mark 'x' is at token 3 of 3"),
        ({"marks": {-1: "x"}}, "mark 'x' is at token -1 of 3"),
        ({"marks": {0: "x"}}, "mark 'x' is on token 0, which spells 1 bytes"),
        ({"marks": {1: "x"}}, "mark 'x' is on token 1, which spells 1 bytes"),
    ],
)
def test_an_invalid_token_sequence_is_rejected(changes, message):
    with pytest.raises(DataError, match=message):
        sequence(**changes)


def test_a_token_sequence_ends_the_turn_if_its_last_mark_is_the_end_of_turn():
    assert sequence().ends_turn
    assert not sequence(marks={2: "other"}).ends_turn
    assert not sequence(token_ids=[0, 5, 6], byte_ends=[0, 1, 2], marks={0: END_OF_TURN}).ends_turn
    assert not TokenSequence([], [], b"").ends_turn
    assert len(sequence()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": [3, 1], "logprobs": [-0.5, -1.5]}, r"expected one shape \[rows, k\]"),
        ({"ids": [[3], [4]]}, r"expected one shape \[rows, k\]"),
        ({"token_logprobs": [-1.5]}, r"token_logprobs has shape \(1,\), expected \(2,\)"),
        ({"tail_logprobs": [[-1.0], [-1.0]]}, r"tail_logprobs has shape \(2, 1\)"),
        ({"logprobs": [[-0.5, -1.5], [NAN, -INF]]}, "logprobs of row 1: NaN or a value above"),
        (
            {"logprobs": [[0.01, -1.5], [-0.1, -INF]]},
            "logprobs of row 0: NaN or a value above",
        ),
        ({"token_logprobs": [-1.0, NAN]}, "token_logprobs of row 1: NaN"),
        ({"tail_logprobs": [-1.0, 0.5]}, "tail_logprobs of row 1: NaN or a value above 0"),
        ({"logprobs": [[-0.5, -1.5], [-0.1, -9.0]]}, "row 1: id -1 and logprob -inf do not"),
        (
            {"ids": [[3, 1], [4, 7]]},
            "row 1: id -1 and logprob -inf do not",
        ),
        ({"ids": [[3, 1], [4, -2]]}, "Expected -1 exactly where the logprob is -inf"),
        ({"logprobs": [[-1.5, -0.5], [-0.1, -INF]]}, "expected the most likely first"),
        (
            {"ids": [[3, 1], [-1, 4]], "logprobs": [[-0.5, -1.5], [-INF, -0.1]]},
            "expected the most likely first",
        ),
        ({"ids": [[3, 3], [4, -1]]}, "a token id occurs twice in one row"),
        (
            {"logprobs": [[-0.1, -0.2], [-0.1, -INF]]},
            r"row 0: probability mass above 1 \(found 1.7",
        ),
    ],
)
def test_invalid_top_k_logprobs_are_rejected(changes, message):
    with pytest.raises(DataError, match=message):
        topk(**changes)


def test_top_k_logprobs_accept_rounding_errors():
    assert topk(token_logprobs=[-INF, 0.0], tail_logprobs=[-INF, 1e-6]).k == 2
    assert len(topk()) == 2
    assert topk(ids=[[-1, -1], [-1, -1]], logprobs=[[-INF, -INF], [-INF, -INF]]).k == 2
    assert topk(ids=np.zeros((2, 0)), logprobs=np.zeros((2, 0))).k == 0


@pytest.mark.parametrize(
    ("messages", "teachers", "message"),
    [
        ((), {"math": 1.0}, "prompt 7 has no messages"),
        ("user", {"math": 0.0}, "each with a finite weight above 0"),
        ("user", {"math": 1.0, "code": -1.0}, "each with a finite weight above 0"),
        ("user", {"math": NAN}, "each with a finite weight above 0"),
        ("user", {"math": INF}, "each with a finite weight above 0"),
    ],
)
def test_an_invalid_prompt_is_rejected(messages, teachers, message):
    turns = (Message(role="user", content="?"),) if messages else ()

    with pytest.raises(DataError, match=message):
        Prompt(7, turns, teachers)


def test_a_prompts_weights_sum_to_one():
    prompt = Prompt(0, (Message(role="user", content="?"),), {"math": 3, "code": 1}, {"line": 4})

    assert prompt.teachers == {"math": 0.75, "code": 0.25}
    assert prompt.metadata == {"line": 4}
    with pytest.raises(TypeError):
        prompt.teachers["math"] = 1.0
    with pytest.raises(TypeError):
        prompt.metadata["line"] = 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampled_logprobs": [-0.1]}, r"3 completion tokens but sampled logprobs of shape \(1,\)"),
        ({"finish_reason": "length"}, "finish reason 'length', but the completion ends with"),
        ({"completion": sequence(marks={})}, "finish reason 'stop', but the completion does not"),
    ],
)
def test_an_invalid_rollout_is_rejected(changes, message):
    with pytest.raises(DataError, match=message):
        rollout(**changes)


def test_a_teacher_score_has_a_row_for_each_token():
    with pytest.raises(DataError, match="a teacher scored 2 rows for 3 tokens"):
        TeacherScore("m", sequence(), topk())


def test_a_response_has_an_id_for_each_score():
    with pytest.raises(DataError, match="a response with 1 ids for 0 scores"):
        LogprobsResponse("m", ("a",), ())


def test_arrays_in_values_are_read_only_and_of_the_stated_types():
    values = [
        (sequence(), ("token_ids", "int32"), ("byte_ends", "int32")),
        (topk(), ("ids", "int32"), ("logprobs", "float32"), ("token_logprobs", "float32")),
        (topk(), ("tail_logprobs", "float32")),
        (rollout(), ("prompt_token_ids", "int32"), ("sampled_logprobs", "float32")),
    ]
    for value, *fields in values:
        for name, dtype in fields:
            array = getattr(value, name)
            assert array.dtype == dtype
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def test_a_value_does_not_change_with_the_array_that_it_was_made_of():
    ids = np.array([5, 6, 0], dtype=np.int32)
    marks = {2: END_OF_TURN}
    value = sequence(token_ids=ids, marks=marks)

    ids[0] = 9
    marks.clear()

    assert value.token_ids.tolist() == [5, 6, 0]
    assert value.ends_turn
    assert ids.flags.writeable


def test_a_read_only_view_of_a_writeable_array_is_copied():
    owner = np.arange(4, dtype=np.int32)
    view = owner[1:]
    view.flags.writeable = False

    frozen = frozen_array(view, "int32")
    owner[1] = 9

    assert frozen.tolist() == [1, 2, 3]


def test_a_read_only_array_is_not_copied():
    frozen = frozen_array([1, 2, 3], "int32")

    assert np.may_share_memory(frozen_array(frozen[1:], "int32"), frozen)
    assert frozen_array(np.zeros((4, 4))[:, 0], "float32").flags.c_contiguous


def test_errors_are_one_tree_and_the_fitting_builtins():
    assert issubclass(ConfigError, (MopdError, ValueError))
    assert issubclass(DataError, MopdError)
    assert issubclass(DataError, ValueError)
    assert issubclass(TeacherError, MopdError)
    assert issubclass(TeacherError, RuntimeError)
    assert TeacherError("no response").status is None
    assert TeacherError("refused", status=413).status == 413


CHARACTERS = [b"a", "é".encode(), "的".encode()]
PIECES = st.lists(st.sampled_from([*CHARACTERS, b"\xe7", b"\x84", b"\xff"]))


def completion_of(text: bytes, *, finished: bool) -> Rollout:
    ids, ends = [*text], [*range(1, len(text) + 1)]
    marks = {len(text): END_OF_TURN} if finished else {}
    if finished:
        ids, ends = [*ids, 0], [*ends, len(text)]
    return rollout(
        completion=TokenSequence(np.array(ids), np.array(ends), text, marks),
        sampled_logprobs=np.zeros(len(ids)),
        finish_reason="stop" if finished else "length",
    )


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@given(parts=PIECES, finished=st.booleans())
def test_invalid_bytes_are_those_outside_of_characters(parts: list[bytes], finished: bool) -> None:
    text = b"".join(parts)
    valid, position, incomplete = 0, 0, 0
    while position < len(text):
        for length in (1, 2, 3):
            if is_character(text[position : position + length]):
                valid += length
                break
        else:
            length = 1
            rest = text[position:]
            # A character may have been cut after its first byte.
            if not finished and rest in (b"\xe7", b"\xe7\x84"):
                incomplete, length = len(rest), len(rest)
        position += length
    expected = len(text) - valid - incomplete
    assert completion_of(text, finished=finished).invalid_bytes == expected
