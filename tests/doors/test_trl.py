"""TRL's scorers and trainers against a teacher service."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.trl_translation.__main__ import ARMS, main
from tests.doors.conftest import ENVIRONMENTS, ROUNDING, TOP_K, Teacher

pytestmark = pytest.mark.doors


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_the_models_at_every_position(
    temperature: float, run_script: Callable[..., Any], teacher: Teacher
) -> None:
    result = run_script("trl", "trl_scorers.py", temperature=temperature)
    for number, (ids, start) in enumerate(
        zip(teacher.sequences, teacher.prompt_lengths, strict=True)
    ):
        expected = teacher.logprobs(ids, temperature).numpy()[start - 1 :]
        top = np.sort(expected, axis=1)[:, : -TOP_K - 1 : -1]
        own = np.array([row[token] for row, token in zip(expected, ids[start:], strict=True)])
        for client in ("sync", "mopd"):
            scores = {name: np.array(part[number]) for name, part in result[client].items()}
            entries = np.take_along_axis(expected, scores["logprob_token_ids"], axis=1)
            np.testing.assert_allclose(scores["logprobs"], entries, atol=ROUNDING)
            np.testing.assert_allclose(scores["logprobs"], top, atol=ROUNDING)
            np.testing.assert_allclose(scores["actual_logprobs"][:, 0], own, atol=ROUNDING)
            assert scores["actual_token_ids"][:, 0].tolist() == ids[start:]
        token_ids, logprobs = result["async"][number]
        assert len(token_ids) == len(ids) - start
        for row, entries in enumerate(token_ids):
            assert ids[start + row] in entries
            assert TOP_K <= len(entries) <= TOP_K + 1
            np.testing.assert_allclose(logprobs[row], expected[row][entries], atol=ROUNDING)
            np.testing.assert_allclose(logprobs[row][:TOP_K], top[row], atol=ROUNDING)


def test_trainers_take_a_service(run_script: Callable[..., Any], student: Path) -> None:
    prompts = [[{"role": "user", "content": f"{n} + {n + 1} ="}] for n in range(8)]
    losses = run_script("trl", "trl_training.py", student=str(student), prompts=prompts)
    assert losses["server_mopd"] == pytest.approx(losses["server"], rel=1e-5)
    assert losses["forward"] == pytest.approx(losses["server"], rel=1e-3)
    assert losses["accumulated"] == pytest.approx(losses["forward"], rel=1e-3)
    for name, values in losses.items():
        assert len(values) == 3, name
        assert all(value > 0 for value in values), name


def test_comparison_of_trainers_on_translated_scores(tmp_path: Path) -> None:
    python = str(ENVIRONMENTS / "trl" / "bin" / "python")
    few = ["--seeds", "0", "--steps", "2", "--every", "1", "--exercises", "4", "--model-steps", "2"]
    main(["--trl-python", python, "--runs", str(tmp_path), *few])
    results = json.loads((tmp_path / "words.json").read_text())["results"]
    assert [each["arm"] for each in results] == list(ARMS)
    for each in results:
        assert [*each["curve"]] == ["0", "1", "2"]
        assert (each["coverage"]["positions"] > 0) == each["arm"].startswith("trl")
