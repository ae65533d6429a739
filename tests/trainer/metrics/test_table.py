"""The table of metrics covers what a step measures."""

import ast
from pathlib import Path

import pytest

from mopd_client.transport.counters import Counters
from mopd_trainer.metrics.step_metrics import (
    reference_answer_metrics,
    rollout_metrics,
    teacher_metrics,
)
from mopd_trainer.metrics.table import metric_row, metric_rows
from mopd_trainer.metrics.timers import StepTimer

LOSSES = Path(__import__("mopd_losses").__file__).parent


def measured_names() -> set[str]:
    """Return the keys of every ``measured`` mapping in the losses' modules."""
    names: set[str] = set()
    for path in LOSSES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            mappings: list[ast.expr] = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "LossOutput":
                mappings = node.args[1:2]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "measured":
                mappings = [node.value]
            for mapping in mappings:
                if isinstance(mapping, ast.Dict):
                    keys = [key for key in mapping.keys if isinstance(key, ast.Constant)]
                    names |= {str(key.value) for key in keys}
    return names


def test_every_measurement_of_a_loss_is_in_the_table() -> None:
    names = measured_names()
    assert "teacher_mass" in names
    assert not [n for n in names if metric_row(f"teacher/math/{n}_mean") is None]


def test_every_metric_of_a_step_is_in_the_table() -> None:
    metrics = {
        **rollout_metrics([], step=0),
        **reference_answer_metrics([]),
        **teacher_metrics([], {}, {"a/b teacher": Counters()}, {"a/b teacher": 400}),
        **StepTimer().pop(),
    }
    assert not [name for name in metrics if metric_row(name) is None]


@pytest.mark.parametrize("name", ["losss", "teacher//tokens", "teacher/math/token", "dropped/x/"])
def test_an_unknown_name_has_no_row(name: str) -> None:
    assert metric_row(name) is None


def test_each_row_has_a_meaning() -> None:
    rows = list(metric_rows())
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.meaning for row in rows)
