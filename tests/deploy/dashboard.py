"""Compare the queries of dashboards and alerts with the metrics that a teacher exports."""

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

#: Labels that Prometheus itself adds when it scrapes, by deploy/prometheus/prometheus.yml.
_ADDED = {"teacher", "job", "instance"}
#: Metrics that Prometheus itself makes.
_MADE = {"up"}
#: A reason that no request has had yet has no series.
_ANY_VALUE = {"reason"}


def queries(file: Path) -> list[str]:
    """All expressions of a dashboard or a file of rules."""
    if file.suffix == ".json":
        panels = json.loads(file.read_text())["panels"]
        return [target["expr"] for panel in panels for target in panel["targets"]]
    groups = yaml.safe_load(file.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def series(exposition: str) -> dict[str, list[dict[str, str]]]:
    """Metric name -> labels of each of its series."""
    labels: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels.setdefault(sample.name, []).append(sample.labels)
    return labels


def selectors(query: str) -> list[Any]:
    """The vector selectors of an expression; Grafana's variables are filled in."""
    filled = query.replace("$__rate_interval", "1m").replace('"$teacher"', '".*"')
    return _selectors(promql_parser.parse(filled))


def unmatched(query: str, exported: dict[str, list[dict[str, str]]]) -> list[str]:
    """Names of metrics without a matching series in ``exported``."""
    return [s.name for s in selectors(query) if s.name not in _MADE and not _matched(s, exported)]


def _matched(selector: Any, exported: dict[str, list[dict[str, str]]]) -> bool:
    return any(
        all(_matches(matcher, labels) for matcher in selector.matchers.matchers)
        for labels in exported.get(selector.name, [])
    )


def _matches(matcher: Any, labels: dict[str, str]) -> bool:
    if matcher.name in _ADDED:
        return True
    if matcher.name in _ANY_VALUE:
        return matcher.name in labels
    return re.fullmatch(matcher.value, labels.get(matcher.name, "")) is not None


def _selectors(node: Any) -> list[Any]:
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    if isinstance(node, promql_parser.MatrixSelector):
        return [node.vector_selector]
    children = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "param")]
    children += getattr(node, "args", [])
    return [s for child in children if child is not None for s in _selectors(child)]
