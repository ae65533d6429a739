"""Losses per token of each completion, for any packing, and their JSON."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mopd_losses.core.loss import LossOutput
from mopd_losses.core.student_rows import DenseRows
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import pack
from mopd_trainer.metrics.token_losses import TokenLosses, rounded, token_losses
from mopd_trainer.run_folder.files import COMPLETIONS
from mopd_trainer.run_folder.journal import Journal
from mopd_trainer.run_folder.logged_completion import logged_completion
from mopd_trainer.student.student import Student
from tests.trainer.scored_examples import aligned_pair, example, losses_for
from tests.trainer.students import ids_of, rollout
from tests.trainer.training.test_learner import double_student, examples, learner_of


def by_hand(student: Student, item: TrainingExample) -> dict[str, list[float]]:
    """Return nats per token by teacher, one context at a time; NaN inside spans."""
    losses = losses_for(student, {"code": "reverse_kl"})
    real_ids = torch.tensor(student.table.real_ids(student.identity.logit_width))
    prompt = item.rollout.prompt_token_ids.tolist()
    ids = item.rollout.completion.token_ids.tolist()
    rows = [
        student.model(torch.tensor([[*prompt, *ids[:row]]])).logits[0, -1]
        for row in range(len(ids))
    ]
    expected: dict[str, list[float]] = {}
    for score in item.scores:
        loss = losses[score.teacher]
        targets = loss.targets([aligned_pair(item, score)], [0])
        values = loss(DenseRows(torch.stack(rows), real_ids), targets)
        starts = set(score.alignment.student_starts.tolist())
        expected[score.teacher] = [
            value if token in starts else math.nan
            for token, value in enumerate(values.per_token.tolist())
        ]
    return expected


def step_losses(
    student: Student, chosen: list[TrainingExample], budget: int
) -> list[dict[str, TokenLosses]]:
    """Make a step; return the losses of each example by teacher."""
    batches = pack(chosen, tokens_per_micro_batch=budget)
    tokens = sum(len(item.rollout.completion) for item in chosen)
    _, losses = learner_of(student).update(batches, tokens=tokens, step=0)
    return [
        {n: loss.per_example[index] for n, loss in losses.items() if index in loss.per_example}
        for index in range(len(chosen))
    ]


@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_each_token_has_its_loss_by_each_of_its_teachers(budget: int) -> None:
    chosen = examples()
    expected = [by_hand(double_student(), item) for item in chosen]
    actual = step_losses(double_student(), chosen, budget)

    for losses, other in zip(actual, expected, strict=True):
        assert losses.keys() == other.keys()
        for name, values in other.items():
            np.testing.assert_allclose(losses[name], values, rtol=1e-5)
    inside = [math.isnan(value) for value in actual[2]["code"].tolist()]
    assert any(inside), "a character of several tokens should be one span for the other tokenizer"
    assert not all(inside)


def test_identical_models_were_compared() -> None:
    item = example(rollout("digit", ids_of("digit", "12 + 30"), teachers={"code": 1.0}))
    [batch] = pack([item], tokens_per_micro_batch=60)
    compared = torch.tensor([1, 0, 0.5, 1, 1, 1])
    losses = token_losses(
        LossOutput(torch.zeros(batch.slots), compared), batch.teachers["code"], batch
    )[0]
    assert [math.isnan(value) for value in losses.tolist()] == (compared == 0).tolist()


def test_four_digits_are_kept() -> None:
    values = np.array([0.123456, 12345.6, 1.23456e-7, np.nan, 0.0, -2.0], dtype=np.float32)
    assert rounded(values) == [0.1235, 12350.0, 1.235e-07, None, 0.0, -2.0]
    assert json.dumps(rounded(values)) == "[0.1235, 12350.0, 1.235e-07, null, 0.0, -2.0]"


def test_the_tokens_of_a_written_completion_are_its_bytes(tmp_path: Path) -> None:
    ids = ids_of("digit", "7 ", "的".encode(), b"\xff", "<|end|>")
    item = example(rollout("digit", ids, teachers={"math": 1.0}))
    nats = np.arange(len(ids), dtype=np.float32)
    nats[1] = np.nan
    with Journal(tmp_path, from_step=0, tensorboard=False) as journal:
        journal.write_completions([logged_completion(1, item, {"math": nats, "code": None})])
    line = json.loads((tmp_path / COMPLETIONS).read_text())

    spelled = [bytes.fromhex(each) for each in line["tokens"]["bytes"]]
    assert line["tokens"]["ids"] == ids
    assert spelled == [b"7", b" ", b"\xe7", b"\x9a", b"\x84", b"\xff", b""]
    assert b"".join(spelled) == item.rollout.completion.text
    assert line["tokens"]["marks"] == {"6": "end_of_turn"}
    assert line["nats"] == {"math": [0.0, None, 2.0, 3.0, 4.0, 5.0, 6.0]}


def test_the_first_tokens_of_a_long_completion_are_logged(tmp_path: Path) -> None:
    ids = [*ids_of("digit", "7" * 600), *ids_of("digit", "<|end|>")]
    item = example(rollout("digit", ids, teachers={"math": 1.0}))
    with Journal(tmp_path, from_step=0, tensorboard=False) as journal:
        journal.write_completions(
            [logged_completion(1, item, {"math": np.full(601, 0.12345, dtype=np.float32)})]
        )
    text = (tmp_path / COMPLETIONS).read_text()
    line = json.loads(text)

    assert line["completion"] == "7" * 600
    tokens, nats = line["tokens"], line["nats"]["math"]
    assert tokens["count"] == 601
    assert len(tokens["ids"]) == len(tokens["bytes"]) == len(nats) == 512
    assert tokens["marks"] == {}
    assert len(text) < 600 + 512 * 44 + 500
