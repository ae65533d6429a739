"""Requests for a completion, and the student's tokens to align with the scores."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.projection.control_tokens import ControlTokens
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import ControlToken
from mopd_protocol.teacher_input import TeacherInput
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenRoles
from mopd_trainer.data.teacher_input import text_view, token_view
from tests.trainer.students import (
    MESSAGES,
    encoder,
    encoder_without_bytes,
    ids_of,
    rollout,
    table,
    tokenizer,
)

HAN = "的".encode()  # three bytes


def seen(*pieces: str | bytes, student: str = "digit", teacher: str = "whole_number"):
    return text_view(rollout(student, ids_of(student, *pieces)), table(student), encoder(teacher))


def sent(view: TeacherInput) -> str | list[str]:
    """The completion of the request, control tokens as ⟨name⟩."""
    completion = view.request.completion
    assert completion is not None
    if all(isinstance(part, str) for part in completion):
        return "".join(map(str, completion))
    return [f"⟨{part.control}⟩" if isinstance(part, ControlToken) else part for part in completion]


def test_a_finished_completion_is_sent_as_text_without_its_ending() -> None:
    view = seen(" 7 的 🙂\n", "<|end|>")
    assert sent(view) == " 7 的 🙂\n"
    assert view.request.finished
    assert view.request.messages == [*MESSAGES]
    assert view.request.completion_token_ids is None
    assert view.request.prompt_token_ids is None
    assert (view.control_tokens_as_text, view.invalid_utf8_bytes) == (0, 0)
    assert view.completion.text == " 7 的 🙂\n".encode()


def test_a_completion_cut_by_its_length_is_not_finished() -> None:
    view = seen("12 + 30")
    assert sent(view) == "12 + 30"
    assert not view.request.finished


def test_a_control_token_that_the_teacher_has_is_sent_by_name() -> None:
    view = seen("a", "<|user|>", "<|system|>", "b", "<|end|>")
    assert sent(view) == ["a", "⟨<|user|>⟩", "⟨<|system|>⟩", "b"]
    assert view.completion.text == b"ab"
    assert view.control_tokens_as_text == 0


def test_a_control_token_that_the_teacher_has_not_is_sent_as_its_text() -> None:
    view = seen("a", "<|pad|>", "b", "<|user|>")
    assert sent(view) == ["a<|pad|>b", "⟨<|user|>⟩"]
    assert view.control_tokens_as_text == 1
    assert view.completion.text == b"a<|pad|>b"
    assert view.completion.byte_ends.tolist() == [1, 8, 9, 9]
    assert list(view.completion.marks) == [3]
    assert view.completion.token_ids.tolist() == ids_of("digit", "a", "<|pad|>", "b", "<|user|>")


def test_text_that_spells_a_control_token_stays_text() -> None:
    assert sent(seen("<|us", "er|>", "<|end|>")) == "<|user|>"


def test_a_control_token_that_would_end_the_teachers_turn_is_sent_as_its_text() -> None:
    own = table("whole_number")
    roles = TokenRoles(eos=own.controls["<|user|>"])
    backend = tokenizer("whole_number").backend_tokenizer
    ends_early = TextEncoder(backend, replace(own, roles=roles))
    completion = rollout("digit", ids_of("digit", "a", "<|user|>", "<|end|>"))
    view = text_view(completion, table("digit"), ends_early)
    assert sent(view) == "a<|user|>"
    assert view.request.finished
    assert view.control_tokens_as_text == 1


@pytest.mark.parametrize(
    ("pieces", "text", "unsent"),
    [
        (("ab", b"\xff", "cd", "<|end|>"), "ab", 3),
        ((b"\xff", "<|end|>"), "", 1),
        (("ab", HAN[:2], "<|end|>"), "ab", 2),
        (("ab", HAN[:2]), "ab", 2),
        (("ab", HAN[:2], "<|pad|>", HAN[2:]), "ab", 10),
        (("ab", HAN[:2], "<|user|>", HAN[2:], "c"), "ab", 4),
        (("ab", HAN, HAN[:1]), "ab的", 1),
    ],
)
def test_bytes_that_the_teacher_has_no_token_for_end_the_completion_and_are_counted(
    pieces: tuple[str | bytes, ...], text: str, unsent: int
) -> None:
    completion = rollout("digit", ids_of("digit", *pieces))
    view = text_view(completion, table("digit"), encoder_without_bytes("whole_number"))
    assert sent(view) == text
    assert view.invalid_utf8_bytes == unsent
    assert not view.request.finished


def test_control_tokens_before_the_cut_are_sent_and_those_after_it_are_not() -> None:
    ids = ids_of("digit", "ab", "<|user|>", b"\xff", "<|system|>", "c")
    view = text_view(rollout("digit", ids), table("digit"), encoder_without_bytes("whole_number"))
    assert sent(view) == ["ab", "⟨<|user|>⟩"]


@pytest.mark.parametrize("teacher", ["digit", "whole_number", "sentencepiece"])
@pytest.mark.parametrize("ending", [(), ("<|end|>",)])
def test_a_completion_that_is_no_text_is_sent_as_the_teachers_tokens(
    teacher: str, ending: tuple[str, ...]
) -> None:
    view = seen("ab ", HAN[:2], "的 12", b"\xff", *ending, teacher=teacher)
    ids = view.request.completion_token_ids
    assert ids is not None
    assert view.request.completion is None
    assert (
        table(teacher).sequence(ids).text
        == view.completion.text
        == b"ab " + HAN[:2] + ("的 12".encode() + b"\xff")
    )
    assert ids[: len(encoder(teacher).encode("ab "))] == encoder(teacher).encode("ab ")
    assert view.request.finished == bool(ending)
    assert view.invalid_utf8_bytes == 0


def test_control_tokens_between_bytes_that_are_no_text_are_sent_as_the_teachers() -> None:
    view = seen(HAN[:1], "<|user|>", HAN[1:], "<|system|>", "c", "<|pad|>")
    other = table("whole_number")
    sequence = other.sequence(view.request.completion_token_ids or [])
    assert sequence.text == view.completion.text == HAN + b"c<|pad|>"
    ends = {name: int(sequence.byte_ends[at]) for at, name in sequence.marks.items()}
    assert ends == {"<|user|>": 1, "<|system|>": 3}


def test_character_of_several_tokens_is_complete() -> None:
    view = seen(HAN[:1], HAN[1:2], HAN[2:], "<|end|>")
    assert sent(view) == "的"
    assert view.request.finished


def test_a_completion_of_nothing_but_its_end_is_empty_and_finished() -> None:
    view = seen("<|end|>")
    assert sent(view) == ""
    assert view.request.finished


NAMES = st.sampled_from(["digit", "whole_number", "sentencepiece"])


@given(student=NAMES, teacher=NAMES, lacks_bytes=st.booleans(), data=st.data())
def test_any_completion_is_sent_as_a_prefix(
    student: str, teacher: str, lacks_bytes: bool, data: st.DataObject
) -> None:
    own, other = table(student), table(teacher)
    special = sorted(own.controls.values())
    raw = [own.all_bytes.index(bytes([byte])) for byte in (0x41, 0xE7, 0x9A, 0x84, 0xFF)]
    pick = st.one_of(st.sampled_from([*special, *raw]), st.integers(0, own.size - 1))
    ids = data.draw(st.lists(pick, min_size=1, max_size=12))
    ending = next((at for at, token in enumerate(ids) if token in own.roles.ending), len(ids))
    encodes = encoder_without_bytes(teacher) if lacks_bytes else encoder(teacher)
    view = text_view(rollout(student, ids[: ending + 1]), own, encodes)
    request = view.request
    if request.completion_token_ids is None:
        spelled = b"".join(text.encode() for text in request.completion_texts)
        named = [part for part in request.completion_parts if isinstance(part, ControlToken)]
        assert all(part.control in other.controls for part in named)
    else:
        spelled = other.sequence(request.completion_token_ids).text
        with pytest.raises(UnicodeDecodeError):
            view.completion.text.decode()
    assert spelled == view.completion.text[: len(spelled)]
    assert len(spelled) + view.invalid_utf8_bytes == len(view.completion.text)
    assert lacks_bytes or not view.invalid_utf8_bytes
    assert request.finished == (ending < len(ids) and not view.invalid_utf8_bytes)


def test_a_teacher_with_the_same_tokenizer_gets_the_ids_without_their_ending() -> None:
    ids = ids_of("digit", "7", HAN[:2], "<|pad|>", "<|end|>")
    finished = token_view(rollout("digit", ids))
    assert finished.request.completion_token_ids == ids[:-1]
    assert finished.request.completion is None
    assert finished.request.finished
    unfinished = token_view(rollout("digit", ids[:-1]))
    assert unfinished.request.completion_token_ids == ids[:-1]
    assert not unfinished.request.finished
    assert len(finished.completion) == len(ids)


def test_an_ordinary_token_that_ends_for_the_teacher_is_sent_as_one_that_does_not() -> None:
    """Base student and instruct teacher: each has the other's end as an ordinary token."""
    own = table("digit")
    end, pad = own.controls["<|end|>"], own.controls["<|pad|>"]
    teacher = replace(own, roles=TokenRoles(eos=pad, end_of_turn=pad, pad=end))
    ids = ids_of("digit", "7", "<|pad|>", "<|end|>")
    controls = ControlTokens.of(own, teacher)
    view = token_view(rollout("digit", ids), controls)
    assert view.request.completion_token_ids == [*ids_of("digit", "7"), end]
    assert view.request.finished
    cut = token_view(rollout("digit", ids[:-1]), controls)
    assert cut.request.completion_token_ids == [*ids_of("digit", "7"), end]
    assert not cut.request.finished


def test_an_end_of_the_teacher_before_the_students_is_sent_with_an_explicit_end() -> None:
    """A service appends no end behind one."""
    own = table("digit")
    end, pad = own.controls["<|end|>"], own.controls["<|pad|>"]
    teacher = replace(own, roles=TokenRoles(eos=end, end_of_turn=end, other_ends=(pad,)))
    ids = ids_of("digit", "7", "<|pad|>", "<|end|>")
    view = token_view(rollout("digit", ids), ControlTokens.of(own, teacher))
    assert view.request.completion_token_ids == ids
    assert not view.request.finished
    receiver = TeacherTokenizer(tokenizer("digit").backend_tokenizer, teacher, encoder("digit"))
    assert receiver.completion(view.request).token_ids.tolist() == ids
