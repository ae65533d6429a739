"""Names of evaluation metrics: ``evaluation/<set>/<metric>``, of a teacher
``evaluation/<set>/teacher/<teacher>/<metric>``; ``source/<source>/`` may precede the metric."""

import re
from collections.abc import Mapping

from mopd_trainer.metrics.step_metrics import Metrics

PREFIX = "evaluation/"

_NAME = re.compile(r"evaluation/([^/]+)/(?:teacher/(.+?)/)?((?:source/.+/|\w*gap_closed/.+)?[^/]*)")

#: Model ("" for the student) -> set -> metric -> value.
ByModel = dict[str, dict[str, Metrics]]


def prefixed(metrics: Metrics, name: str, *, teacher: str = "") -> Metrics:
    """Return the metrics of a set under their names in the journal."""
    prefix = f"{PREFIX}{name}/" + (f"teacher/{teacher}/" if teacher else "")
    return {f"{prefix}{key}": value for key, value in metrics.items()}


def by_model(metrics: Mapping[str, float | None]) -> ByModel:
    """Group measured evaluation metrics by model and set; other metrics are skipped."""
    groups: ByModel = {}
    for key, value in metrics.items():
        match = _NAME.fullmatch(key)
        if match and value is not None:
            name, teacher, metric = match.groups()
            groups.setdefault(teacher or "", {}).setdefault(name, {})[metric] = value
    return groups
