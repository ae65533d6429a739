"""Render the chart with Helm's own library."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

CHART = str(Path(__file__).parents[2] / "deploy" / "helm")


class ChartError(ValueError):
    """The values are invalid; the message is Helm's."""


def objects(values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of a release named ``mopd`` in the namespace ``teachers``.

    Raises:
        ChartError: if the values are invalid.
    """
    files = [yaml.safe_load_all(text) for text in _render(json.dumps(values or {})).values()]
    return [each for documents in files for each in documents if each]


def findings() -> list[str]:
    """Return warnings and errors of ``helm lint``."""
    messages = helm.lint(CHART)["messages"]
    return [each["error"] for each in messages if each["severity"] > 1]


@cache
def _render(values: str) -> dict[str, str]:
    try:
        with helm.Chart.load(CHART) as chart:
            return chart.render(json.loads(values), name="mopd", namespace="teachers")
    except (helm.HelmValuesError, helm.HelmRenderError) as error:
        raise ChartError(str(error)) from error
