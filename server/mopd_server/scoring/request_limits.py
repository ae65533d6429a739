"""Limits of a request that its teacher's manifest determines, and the size of its text."""

from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsRequest, SequenceRequest
from mopd_server.service_error import invalid_field

#: Outside this range, a float32 softmax is one-hot, uniform or NaN.
TEMPERATURE_RANGE = (0.01, 100.0)

#: Requests with more characters and ids are tokenized one at a time: tokenizing a body of 15 MiB
#: takes 2.5 GB before the request is rejected.
LARGE_TEXT = 2**20


def require_within_limits(request: LogprobsRequest, manifest: Manifest) -> None:
    """Validate top-k, temperature and candidates.

    Raises:
        ServiceError: if one of them is above the limit, or the engine does not support it.
    """
    limit = manifest.max_top_k
    if request.top_k > limit:
        raise invalid_field(
            "top_k",
            f"found {request.top_k}, expected at most {limit} (max_top_k in the "
            "manifest of this teacher)",
        )
    require_temperature(request.temperature, manifest)
    for index, sequence in enumerate(request.sequences):
        _require_valid_candidates(f"sequences[{index}].candidate_ids", sequence, manifest)


def require_temperature(temperature: float, manifest: Manifest) -> None:
    """Raise ServiceError 400 unless the teacher supports a temperature."""
    lowest, highest = TEMPERATURE_RANGE if manifest.features.temperature else (1.0, 1.0)
    if not lowest <= temperature <= highest:
        expected = (
            f"{lowest:g} to {highest:g}"
            if manifest.features.temperature
            else "1, the only temperature that the engine of this teacher supports"
        )
        raise invalid_field(
            "temperature",
            f"found {temperature}, expected {expected}",
        )


def text_size(request: LogprobsRequest) -> int:
    """Return the number of characters to tokenize, and of ids to convert."""
    return sum(
        sum(map(len, sequence.prompt_texts))
        + sum(map(len, sequence.completion_texts))
        + len(sequence.prompt_token_ids or ())
        + len(sequence.completion_token_ids or ())
        + sum(map(len, sequence.candidate_ids or ()))
        for sequence in request.sequences
    )


def _require_valid_candidates(key: str, sequence: SequenceRequest, manifest: Manifest) -> None:
    if sequence.candidate_ids is None:
        return
    if not manifest.features.candidate_ids:
        raise invalid_field(
            key,
            "not supported by the engine of this teacher (features in the manifest). Use top_k.",
        )
    widest = max(map(len, sequence.candidate_ids), default=0)
    if widest > manifest.max_top_k:
        raise invalid_field(
            key,
            f"found {widest} ids for one token, expected at most {manifest.max_top_k} (max_top_k "
            "in the manifest of this teacher)",
        )
