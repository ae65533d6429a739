"""Run files for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def run_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """The settings of a small run whose everything lies in ``folder``."""
    values: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": 2,
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "student": {"model": str(folder / "student"), "learning_rate": 1e-3, "device": "cpu"},
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 8},
        "teachers": {
            "math": {"url": "http://127.0.0.1:9", "top_k": 8, "deadline_seconds": 0.05},
            "code": {"url": ["http://127.0.0.1:9"], "top_k": 8, "deadline_seconds": 0.05},
        },
    }
    return {**values, **changes}


def write_run(folder: Path, values: dict[str, Any]) -> Path:
    """The run's YAML."""
    path = folder / "run.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    return path


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prompt_lines(count: int, teachers: Sequence[str] = ("math", "code")) -> list[dict[str, str]]:
    """Lines of data whose teachers take turns."""
    return [
        {"prompt": f"{number} + 4 =", "teacher": teachers[number % len(teachers)]}
        for number in range(count)
    ]
