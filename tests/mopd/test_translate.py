"""``mopd.translate``: tokenizers by folder or loaded, and extra rows on request."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import mopd
from mopd_losses import ExtraRow
from mopd_protocol import TopKLogprobs
from mopd_protocol.errors import ConfigError, DataError
from tests.losses.translation.test_translation import hand_made


def test_extra_rows_are_requested_if_a_function_is_given() -> None:
    """The teacher's `a` is the student's `a` or the beginning of `ab`."""
    shared, completion = hand_made((), "x", "ab", "ac", "ab!")
    sides = {"student": shared.pair.student, "teacher": shared.pair.teacher}
    score = shared.score(completion)
    requested: list[ExtraRow] = []

    def rows(extra_rows: Sequence[ExtraRow]) -> list[TopKLogprobs]:
        requested.extend(extra_rows)
        return [shared.extra_row(each, [score]) for each in extra_rows]

    [without] = mopd.translate([score], [completion.token_ids.tolist()], **sides)
    [translation] = mopd.translate(
        [score], [completion.token_ids.tolist()], **sides, request_rows=rows
    )

    [ab] = shared.pair.student.ids(["ab"])
    assert ab not in without.topk.ids[0]
    at = translation.topk.ids[0].tolist().index(ab)
    assert np.exp(translation.topk.logprobs[0, at]) == pytest.approx(0.5, abs=1e-4)
    assert len(requested) == len(set(requested)) > 0


def test_scores_and_completions_of_different_numbers_are_rejected() -> None:
    shared, completion = hand_made((), "x", "ab")
    sides = {"student": shared.pair.student, "teacher": shared.pair.teacher}
    with pytest.raises(DataError) as error:
        mopd.translate([shared.score(completion)], [], **sides)
    assert error.value.key == "completions"


def test_a_tokenizer_that_is_not_found_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        mopd.translate([], [], student=str(tmp_path), teacher=str(tmp_path))
    assert error.value.key == "tokenizer"
