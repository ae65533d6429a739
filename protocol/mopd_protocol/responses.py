"""``LogprobsResponse``: scores from a teacher, before they are encoded as bytes or as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mopd_protocol.errors import DataError
from mopd_protocol.requests import LogprobsDtype
from mopd_protocol.samples import TeacherScore


@dataclass(frozen=True, eq=False)
class LogprobsResponse:
    """Scores in the order of the request's sequences; rows cover completion tokens only.

    Raises:
        DataError: when there is not one id for each score.
    """

    manifest_id: str
    ids: tuple[str | None, ...]  # as given in the request
    scores: tuple[TeacherScore, ...]
    timings: Mapping[str, float] = field(default_factory=dict[str, float])  # phase -> seconds
    logprobs_dtype: LogprobsDtype = "float32"  # precision in which the top-k was received
    urls: tuple[str, ...] = ()  # addresses that computed the scores, added by the client

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.scores):
            raise DataError(f"a response with {len(self.ids)} ids for {len(self.scores)} scores")
