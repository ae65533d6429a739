"""Tests of the comparison of losses on tasks: tokenizers, exercises, the oracle, a quick run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.tasks.__main__ import main
from bench.tasks.exercises import TextTask
from bench.tasks.oracle import THRESHOLD, Push
from bench.tasks.pairs import PAIRS, TASKS
from bench.tasks.task_tokenizers import (
    digit_tokenizer,
    free_tokenizer,
    student_tokenizer,
    unigram_tokenizer,
)
from mopd.demo.examples import Encoder

PUSH = Push(
    task="dates",
    text="answers",
    belief="equal",
    prompt="17.01.2024",
    student_tokens=("202", "4"),
    teacher_tokens=("20", "24"),
    position=0,
    target="202",
    probability=0.999,
    ceiling=0.9,
    gradient=0.0,
    nats=0.0,
)


def test_tokenizers_split_numbers_differently() -> None:
    text = ", 2024"
    makers = (student_tokenizer, unigram_tokenizer, digit_tokenizer, free_tokenizer)
    splits = ["|".join(pieces(Encoder(make()), text)) for make in makers]
    assert splits == [",| |202|4", ",| 20|24", ",| |2|0|2|4", ",| 20|24"]


def pieces(encoder: Encoder, text: str) -> list[str]:
    return [encoder.table.all_bytes[token_id].decode() for token_id in encoder.part(text)]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_completions_fit_and_held_out_prompts_are_not_in_the_training_set(task: TextTask) -> None:
    known, unseen = task.training(0), task.held_out()
    assert not {e.prompt for e in known} & {e.prompt for e in unseen}
    name = known[0].task
    pair = PAIRS[name]
    for side in (*pair.teachers.values(), *pair.ceiling.values()):
        encoder = Encoder(side.tokenizer())
        lengths = [len(encoder.completion(exercise)) for exercise in known[:300]]
        assert max(lengths) <= side.max_new_tokens
        for exercise in unseen[:20]:
            ids = encoder.completion(exercise)
            assert encoder.table.sequence(ids).text.decode() == exercise.completion


@pytest.mark.parametrize(
    ("gradient", "probability", "excess"),
    [(0.0, 0.999, -0.099), (0.5, 0.95, 0.45), (0.5, 0.2, 0.5)],
)
def test_excess_is_what_the_ceiling_does_not_explain(
    gradient: float, probability: float, excess: float
) -> None:
    push = replace(PUSH, gradient=gradient, probability=probability)
    assert push.excess == pytest.approx(excess)
    assert push.ignored == (probability == 0.2)  # the gradient does not pull


@pytest.mark.slow
def test_quick_comparison_and_oracle(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    common = ["--quick", "--pairs", "dates", "--processes", "1", "--runs", str(tmp_path)]
    main([*common, "--losses", "prefix_kl,topk_kl", "--seeds", "1", "--json", f"{tmp_path}/a.json"])
    losses = json.loads((tmp_path / "a.json").read_text())["pairs"]["dates"]["losses"]
    assert set(losses) == {"prefix_kl", "topk_kl"}
    for figures in losses.values():
        assert figures["after"]["dates"]["seeds"] == 1
        assert 0.0 <= figures["compared_share"] < 1.0 + 1e-6
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

    main([*common, "--losses", "topk_kl", "--oracle", "--prompts", "8", "--json", f"{tmp_path}/b"])
    (rows,) = json.loads((tmp_path / "b").read_text()).values()
    ceiling = next(r for r in rows if (r["text"], r["belief"]) == ("samples", "ceiling"))
    assert ceiling["nats_per_token"] == pytest.approx(0.0, abs=1e-3)  # it is the teacher
    assert all(row["worst"]["gradient"] < THRESHOLD for row in rows if row["belief"] == "ceiling")
