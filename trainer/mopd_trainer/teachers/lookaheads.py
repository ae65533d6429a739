"""Requests for the teacher's distribution behind tokens that completions do not continue with."""

from collections.abc import Iterator, Sequence
from itertools import islice

from mopd_losses.core.loss import Lookahead
from mopd_losses.prefix.lookaheads.open_tokens import OpenToken, OpenTokens
from mopd_losses.prefix.pair import TokenizerPair
from mopd_protocol.arrays import IntArray
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_trainer.data.examples import AlignedScore
from mopd_trainer.teachers.connect import Teacher


def open_tokens_of(teacher: Teacher) -> OpenTokens:
    """Build what finds the open tokens of a teacher. The loss has its own: it may be prepared in
    another thread."""
    student, tokenizer = teacher.student, teacher.tokenizer
    sides = student.table, student.encoder, tokenizer.table, tokenizer.encoder
    return OpenTokens(TokenizerPair(*sides))


def requested(
    open_tokens: OpenTokens, score: AlignedScore, count: int, likely_ids: IntArray | None
) -> Iterator[tuple[OpenToken, SequenceRequest]]:
    """Return the first ``count`` open tokens that a completion does not continue with, and the
    request for each: the text with that token, ended, so that the row behind it is scored.

    Args:
        likely_ids: [tokens, k], the student's in every row: the text ends with the likeliest of its
            tokens that begins with the teacher's.
    """
    completion = score.teacher_input.completion
    tokens = open_tokens.of(completion, score.score, score.alignment, sampled=False)
    requests = ((token, _request(open_tokens, token, score, likely_ids)) for token in tokens)
    return islice(((token, each) for token, each in requests if each is not None), count)


def continued(
    open_tokens: OpenTokens,
    tokens: Sequence[OpenToken],
    score: AlignedScore,
    earlier: Lookahead,
    likely_ids: IntArray | None,
) -> SequenceRequest | None:
    """Return the request for what follows the end of a lookahead, if the teacher is sure of it: the
    student's likely token continued otherwise.

    Args:
        tokens: of the lookahead, see ``scored_lookahead``.
        likely_ids: see ``requested``.
    """
    count = len(tokens)
    behind = open_tokens.after(tokens, earlier.following.rows(count - 1, count))
    return None if behind is None else _request(open_tokens, behind, score, likely_ids)


def _request(
    open_tokens: OpenTokens, token: OpenToken, score: AlignedScore, likely_ids: IntArray | None
) -> SequenceRequest | None:
    """Return the request for a completion that continues with a token; None if it is no text."""
    row = [] if likely_ids is None else likely_ids[token.student_row].tolist()
    text = open_tokens.text_of(score.teacher_input.completion, token, row)
    if text is None:
        return None
    fields = {"completion": text, "completion_token_ids": None}
    fields |= {"finished": True, "candidate_ids": None}
    return score.teacher_input.request.model_copy(update=fields)


def scored_lookahead(
    open_tokens: OpenTokens, token: OpenToken, score: TeacherScore, extended: TeacherScore
) -> tuple[Lookahead | None, list[OpenToken]]:
    """Return the lookahead behind a token, and its open tokens; none if the teacher's tokenizer
    divides the text in another way.

    Args:
        score: of the completion.
        extended: of the text that was requested.
    """
    row = token.teacher_row
    expected = [*score.completion.token_ids[:row].tolist(), int(score.topk.ids[row, 0])]
    ids = extended.completion.token_ids[:-1].tolist()
    if ids[: row + 1] != expected:
        return None, []
    topk = extended.topk
    following = topk.rows(row + 1, len(ids) + 1)
    tokens = [token, *open_tokens.followed(token, ids[row + 1 :], following)]
    rows, behind = following.rows(0, len(tokens)), ids[row + 1 : row + len(tokens)]
    return Lookahead(token.student_row, row, rows, tuple(behind)), tokens
