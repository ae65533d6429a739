"""Check that a teacher's response matches the request."""

from http import HTTPStatus

from mopd_protocol.errors import InvalidResponseError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse


def check_response(
    teacher: str, response: LogprobsResponse, request: LogprobsRequest, manifest: Manifest
) -> None:
    """Check that each sequence has a score and each id a token in the teacher's tokenizer.

    Raises:
        InvalidResponseError: if not, with the field in ``key``.
    """
    expected_ids = tuple(sequence.id for sequence in request.sequences)
    if len(response.scores) != len(expected_ids):
        raise InvalidResponseError(
            f"teacher {teacher!r}: wrong number of scores (found {len(response.scores)}, expected "
            f"{len(expected_ids)})",
            status=HTTPStatus.OK,
            key="scores",
        )
    if response.ids != expected_ids:
        raise InvalidResponseError(
            f"teacher {teacher!r}: wrong sequences (found {list(response.ids)}, expected "
            f"{list(expected_ids)} in this order)",
            status=HTTPStatus.OK,
            key="ids",
        )
    size = manifest.tokenizer_size
    for index, score in enumerate(response.scores):
        # -1 is valid in the top-k only: TopKLogprobs has checked these ids' lower bound.
        highest = max(score.token_ids.max(initial=0), score.topk.ids.max(initial=0))
        lowest = score.token_ids.min(initial=0)
        if highest >= size or lowest < 0:
            raise InvalidResponseError(
                f"teacher {teacher!r}: invalid token id in sequence {index} (found "
                f"{highest if highest >= size else lowest}, expected 0 to {size - 1})",
                status=HTTPStatus.OK,
                key="token_ids",
            )
