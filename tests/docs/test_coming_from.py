"""The page about other trainers and the table of their settings agree."""

import re

import pytest

from mopd_trainer.config.foreign_settings import (
    FOREIGN_SETTINGS,
    UNNECESSARY_SETTINGS,
    counterpart_of,
)
from mopd_trainer.config.loading import known_settings
from tests.docs.pages import PAGES

KNOWN = known_settings()
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", (PAGES / "coming-from.md").read_text(), re.M)
#: ``name``, ``--name VALUE``, ``name: value``, ``section.name=value``.
NAME = re.compile(r"[-+]*(?:[\w.]*\.)?([a-z][a-z_0-9]+)(?:[ =:].*)?")
#: Keys that are too general or have no counterpart.
OTHERS = """
averaged_logits data_source forward_kl kd_loss_mode mixed_kl_weight model_name model_path
n_gpus_per_node select_teacher sum_weights_metric tag_included
"""


def names(cell: str) -> set[str]:
    """Return the names of settings in a cell; other words have no underscore."""
    matches = [NAME.fullmatch(span) for span in re.findall(r"`([^`]+)`", cell)]
    spans = {match[1] for match in matches if match}
    return {name for name in spans if "_" in name or name in FOREIGN_SETTINGS}


def test_every_counterpart_is_a_setting() -> None:
    for setting, note in FOREIGN_SETTINGS.values():
        assert setting in KNOWN
        assert set(re.findall(r"\b(?:student|rollout|data|logging)\.\w+", note)) <= KNOWN
    assert not FOREIGN_SETTINGS.keys() & UNNECESSARY_SETTINGS.keys()


def test_settings_of_the_page_are_those_of_the_table() -> None:
    own = {key.rpartition(".")[2] for key in KNOWN}
    compared: set[str] = set()
    for left, right in ROWS:
        for name in names(left) - set(OTHERS.split()):
            if name in FOREIGN_SETTINGS:
                setting = FOREIGN_SETTINGS[name][0].removeprefix("teachers.NAME.")
                if setting.partition(".")[0] in right:
                    compared.add(name)
            else:
                assert name in UNNECESSARY_SETTINGS or name in own, name
    on_page = {name for left, _ in ROWS for name in names(left)} & FOREIGN_SETTINGS.keys() - set(
        OTHERS.split()
    )
    assert on_page == compared
    assert len(compared) > 60


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("student.gradient_accumulation_steps", "rollout.prompts_per_step"),
        ("teachers.math.loss.beta", "teachers.math.loss.divergence"),
        ("beta", "teachers.NAME.loss.divergence"),
        ("evaluation.sets.sums.eval_dataset", "evaluation.sets.NAME.prompts"),
        ("rollout.num_generations", "rollout.samples_per_prompt"),
    ],
)
def test_a_counterpart_is_a_complete_key(key: str, setting: str) -> None:
    assert f"{setting!r}" in (counterpart_of(key) or "")
