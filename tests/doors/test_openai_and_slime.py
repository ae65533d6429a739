"""The official openai client and slime's reward functions against a teacher service."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.doors.conftest import ROUNDING, TOP_K, Teacher

pytestmark = pytest.mark.doors


def test_scores_are_the_models_at_every_position(
    run_script: Callable[..., Any], teacher: Teacher
) -> None:
    result = run_script("trl", "openai_and_slime.py")
    assert result["refused"]["status"] == 400
    assert "max_tokens" in result["refused"]["text"]
    for number, ids in enumerate(teacher.sequences):
        expected = teacher.logprobs(ids).numpy()
        nothing, *rows = result["openai"][number]
        assert nothing is None
        assert len(rows) == len(ids) - 1
        for row, entries in enumerate(rows):
            assert str(ids[row + 1]) in entries
            assert TOP_K <= len(entries) <= TOP_K + 1
            assert sorted(entry["rank"] for entry in entries.values())[0] == 1
            for token, entry in entries.items():
                assert entry["logprob"] == pytest.approx(expected[row][int(token)], abs=ROUNDING)
        start = teacher.prompt_lengths[number]
        own = [row[token] for row, token in zip(expected, ids[1:], strict=True)][start - 1 :]
        np.testing.assert_allclose(result["slime"][number], own, atol=ROUNDING)
