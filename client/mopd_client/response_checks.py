"""Checks that a teacher's answer is an answer to what was asked."""

from http import HTTPStatus

from mopd_protocol.errors import TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse


def check_answer(
    teacher: str, answer: LogprobsResponse, request: LogprobsRequest, manifest: Manifest
) -> None:
    """Each sequence has its score, and each id its token in the teacher's tokenizer.

    Raises:
        TeacherError: when not.
    """
    asked = tuple(sequence.id for sequence in request.sequences)
    if len(answer.scores) != len(asked):
        raise TeacherError(
            f"teacher {teacher!r} answered {len(answer.scores)} scores, expected {len(asked)}",
            status=HTTPStatus.OK,
        )
    if answer.ids != asked:
        raise TeacherError(
            f"teacher {teacher!r} answered sequences {list(answer.ids)}, expected {list(asked)} "
            "in this order",
            status=HTTPStatus.OK,
        )
    size = manifest.tokenizer_size
    for position, score in enumerate(answer.scores):
        # The top-k's lowest id is -1, for absent entries: the type has checked that.
        highest = max(score.completion.token_ids.max(initial=0), score.topk.ids.max(initial=0))
        lowest = score.completion.token_ids.min(initial=0)
        if highest >= size or lowest < 0:
            raise TeacherError(
                f"teacher {teacher!r} answered token id {highest if highest >= size else lowest} "
                f"in sequence {position}, expected ids 0 to {size - 1} as its manifest says",
                status=HTTPStatus.OK,
            )
