"""Tests of the comparison of losses on tasks: tokenizers, exercises, the oracle, a quick run."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.numerals.accuracy import accuracy
from bench.numerals.material import model_key, train_model
from bench.numerals.pairs import Side, shortened
from bench.numerals.report import table, warnings
from bench.numerals.warm_start import Completion
from bench.tasks.__main__ import main
from bench.tasks.exercises import Mixture, TextTask
from bench.tasks.oracle import THRESHOLD, Push
from bench.tasks.pairs import PAIRS, TASKS
from bench.tasks.task_tokenizers import (
    character_tokenizer,
    chinese_tokenizer,
    digit_tokenizer,
    free_tokenizer,
    phrase_tokenizer,
    student_tokenizer,
    syllable_tokenizer,
    times_tokenizer,
    unigram_tokenizer,
    unigram_word_tokenizer,
    word_tokenizer,
)
from mopd.demo.examples import Encoder
from mopd.demo.tasks import Exercise
from mopd_protocol import TrainingError
from mopd_trainer import Student, StudentConfig

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


def test_teachers_are_trained_on_the_tokens_of_which_completions_are_scored() -> None:
    sides = [side for pair in PAIRS.values() for side in pair.teachers.values()]
    for tokenizer, task in {(side.tokenizer, side.task) for side in sides}:
        encoder = Encoder(tokenizer())
        for exercise in task.training(0)[:100]:
            parts = [token for part in exercise.completion_parts for token in encoder.part(part)]
            assert parts == encoder.part(exercise.completion), exercise


def test_tokenizers_divide_words_and_code_differently() -> None:
    text = " siebenundvierzig Nüsse):\n    if i"
    makers = (word_tokenizer, syllable_tokenizer, phrase_tokenizer)
    splits = ["|".join(pieces(Encoder(make()), text)) for make in makers]
    assert splits == [
        " siebenundvierzig| Nüsse|):\n|   | if| i",
        " |sieb|en|und|v|ier|zig| Nüsse|):|\n   | if| i",
        " |sieb|en|und|vier|zig| Nüsse|):|\n|    if| i",
    ]


def test_a_unigram_vocabulary_has_whole_words() -> None:
    text = "twenty-four to three, Łódź"
    makers = (unigram_word_tokenizer, times_tokenizer)
    splits = ["|".join(pieces(Encoder(make()), text)) for make in makers]
    assert splits == ["twenty|-|four| to| three|,| Łódź", "twenty|-|four| to| th|r|e|e|,| Łódź"]


def test_tokenizers_spell_chinese_by_words_characters_and_bytes() -> None:
    text = "一九四三年十二月二日"
    makers = (chinese_tokenizer, character_tokenizer, student_tokenizer, unigram_tokenizer)
    lengths = [len(Encoder(make()).part(text)) for make in makers]
    assert lengths == [3, 10, 30, 30]
    assert pieces(Encoder(chinese_tokenizer()), text) == ["一九四", "三年十二", "月二日"]


def pieces(encoder: Encoder, text: str) -> list[str]:
    return [encoder.table.all_bytes[token_id].decode() for token_id in encoder.part(text)]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_completions_fit_and_held_out_prompts_are_not_in_the_training_set(task: TextTask) -> None:
    known, unseen = task.training(0), task.held_out()
    assert not {e.prompt for e in known} & {e.prompt for e in unseen}
    name = known[0].task
    pairs = [pair for pair in PAIRS.values() if name in pair.tasks]
    for side in {side for pair in pairs for side in (pair.teachers[name], pair.ceiling[name])}:
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


class Words(TextTask):
    """``n``: one of four months, a task that a few steps suffice for."""

    training_prompts = 100

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        number = random.randrange(1_000)
        return Exercise("words", str(number), (("May", "June", "July", "March")[number % 4],))

    def __repr__(self) -> str:
        return "Words()"


def warm(steps: int, **completion: float) -> Side:
    """Return a student that is trained until it completes a share of ``Words``."""
    task = Words()
    return Side(
        family="gpt_neox",
        tokenizer=student_tokenizer,
        task=task,
        steps=steps,
        examples_per_step=16,
        learning_rate=1e-3,
        max_new_tokens=4,
        completion=Completion((task,), **completion),
    )


def test_warm_start_ends_in_the_range_of_completed_prompts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    side, steps = warm(200, least=0.2, most=0.4), list[int]()
    folders = [
        train_model(side, "student", 0, tmp_path / name, lambda done, _: steps.append(done))
        for name in "ab"
    ]
    assert max(steps[:-1]) == 200  # the end is reported
    students = [
        Student.load(StudentConfig(model=str(folder), device="cpu", learning_rate=1e-3))
        for folder in folders
    ]
    shares = {
        asyncio.run(accuracy(student, side.task.held_out(), side.max_new_tokens))
        for student in students
    }
    (share,) = shares  # deterministic
    assert 0.2 <= share <= 0.4


class Numbers(Words):
    """``May 3``: one of four numbers."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        number = random.randrange(1_000)
        return Exercise("numbers", f"May {number}", (("7", "23", "5", "11")[number % 4],))

    def __repr__(self) -> str:
        return "Numbers()"


def test_warm_start_of_several_tasks_at_once_ends_in_the_range_of_each(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tasks = Words(), Numbers()
    side = replace(
        warm(400),
        task=Mixture(tasks),
        completion=Completion(tasks, least=0.2, most=0.4, at_once=True),
    )
    folder = train_model(side, "student", 0, tmp_path, lambda done, _: None)
    student = Student.load(StudentConfig(model=str(folder), device="cpu", learning_rate=1e-3))
    for task in tasks:
        share = asyncio.run(accuracy(student, task.held_out(), side.max_new_tokens))
        assert 0.2 <= share <= 0.4


def test_warm_start_out_of_range_is_an_error(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with pytest.raises(TrainingError) as error:
        train_model(warm(10, least=0.99, most=1.0), "student", 0, tmp_path, lambda done, _: None)
    assert error.value.key == "steps"
    assert not list(tmp_path.iterdir())


def test_completed_share_is_part_of_a_student_key() -> None:
    student = PAIRS["rows"].student
    assert student.completion
    other = replace(student, completion=replace(student.completion, least=0.12))
    quick = shortened(PAIRS["rows"], 2, 2).student
    assert quick.completion is None
    assert len({model_key(each, "student", 0) for each in (student, other, quick)}) == 3


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


def test_only_losses_that_training_would_warn_about_have_a_line() -> None:
    losses = {
        "prefix_kl": {"warned": [None, None], "ended": [None, None]},
        "ctkd": {"warned": [23, None], "ended": [None, 41]},
    }
    [line] = warnings({"pairs": {"dates": {"losses": losses}}}, "dates")
    assert line.startswith("ctkd: ")
    assert "23/–" in line
    assert "–/41" in line


def test_a_table_of_two_tasks_and_three_seeds_fits_a_terminal() -> None:
    tasks = ["german_numbers", "code_blocks"]
    spread = {"mean": 0.945, "lowest": 0.89, "highest": 1.0}
    figures: dict[str, Any] = {
        "seeds": 3,
        "stopped": [],
        "before": dict.fromkeys(tasks, 0.083),
        "after": dict.fromkeys(tasks, spread),
        "reached": {task: [280, None, 170] for task in tasks},
        "invalid_byte_share": 0.0,
        "compared_share": 0.999,
        "loss": 0.254,
    }
    teachers = {task: {"greedy": 1.0, "sampled": 0.986} for task in tasks}
    losses = dict.fromkeys(("prefix_kl", "topk_kl", "policy_gradient_baseline"), figures)
    pair = {"title": "both", "steps": 150, "tasks": tasks, "losses": losses}
    console = Console(width=80, record=True)
    console.print(table({"pairs": {"a": pair | {"teachers": teachers, "ceiling": {}}}}, "a"))
    shown = console.export_text()
    assert shown.count("94.5 (89–100)") == 6
    assert shown.count("280/–/170") == 6
    assert "100.0 (98.6)" in shown
