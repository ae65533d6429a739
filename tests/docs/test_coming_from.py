"""The page about other trainers and the answers to their settings agree."""

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
#: Values, columns of the data, keys that are too general, and a misspelling of ``top_k``.
OTHERS = """
answer auto averaged_logits data_source dataset drop enabled forward forward_kl grpo k3 key
kd_loss_mode mixed_kl_weight model_name model_path n_gpus_per_node name nnodes py question reverse select_teacher
sum_weights_metric swift sync tag tag_included topk
"""


def names(cell: str) -> set[str]:
    """Return the names of settings in a cell."""
    matches = [NAME.fullmatch(span) for span in re.findall(r"`([^`]+)`", cell)]
    return {match[1] for match in matches if match}


def test_every_counterpart_is_a_setting() -> None:
    for setting, note in FOREIGN_SETTINGS.values():
        assert setting in KNOWN
        assert set(re.findall(r"\b(?:student|rollout|data|logging)\.\w+", note)) <= KNOWN
    assert not FOREIGN_SETTINGS.keys() & UNNECESSARY_SETTINGS.keys()


def test_names_of_the_page_have_answers_and_the_answers_are_those_of_the_page() -> None:
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
def test_the_answer_has_the_complete_key(key: str, setting: str) -> None:
    assert f"{setting!r}" in (counterpart_of(key) or "")
