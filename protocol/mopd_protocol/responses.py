"""``LogprobsResponse``: what a teacher answers, before it is written as bytes or as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mopd_protocol.samples import TeacherScore


@dataclass(frozen=True, eq=False)
class LogprobsResponse:
    """Scores in the order of the request's sequences; rows cover completion tokens only."""

    manifest_id: str
    ids: tuple[str | None, ...]  # as given in the request
    scores: tuple[TeacherScore, ...]
    timings: Mapping[str, float] = field(default_factory=dict[str, float])  # phase -> seconds
