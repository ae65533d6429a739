"""Tests of the comparison of losses on numerals: tokenizers, exercises, runs and reports."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from bench.numerals.__main__ import main
from bench.numerals.distillation import ReferenceSampler, Run, distil, student_config
from bench.numerals.exercises import ADDENDS, Sums, WordLists
from bench.numerals.material import replace_tokens, train_model
from bench.numerals.matrix import Folders, finished
from bench.numerals.numeral_tokenizers import STUDENT_NAMES, digit_tokenizer, numeral_tokenizer
from bench.numerals.pairs import LOSSES, PAIRS, Pair, loss_settings, shortened
from mopd.demo.examples import IGNORED, Encoder, supervised_batch
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.student.student import Student


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of models and results."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("numerals")


def trained(name: str, root: Path, *, steps: int = 2, model_steps: int = 2) -> Pair:
    """Train the models of a pair for a few steps and return the pair."""
    pair = shortened(PAIRS[name], steps, model_steps)
    for model in Run(pair, pair.losses[0], seed=0, evaluations=1).models:
        train_model(*model, Folders(root).models, lambda done, steps: None)
    return pair


def silent(done: int, loss: float, accuracy: float) -> None:
    """Ignore the progress."""


def test_numbers_are_one_token_or_digits() -> None:
    digits, numerals = (
        Encoder(make(STUDENT_NAMES)) for make in (digit_tokenizer, numeral_tokenizer)
    )
    for number in range(1_000):
        text = str(number)
        assert [numerals.table.all_bytes[i] for i in numerals.part(text)] == [text.encode()]
        assert [digits.table.all_bytes[i] for i in digits.part(text)] == [c.encode() for c in text]


def test_held_out_exercises_are_not_in_the_training_set_in_either_order() -> None:
    task = Sums(whole_numbers=True)
    known = {exercise.prompt for exercise in task.training(seed=3)}
    unseen = {exercise.prompt for exercise in task.held_out()}
    assert len(known) + len(unseen) == len(ADDENDS) ** 2
    assert 0.1 < len(unseen) / len(ADDENDS) ** 2 < 0.3
    for prompt in unseen:
        a, b = prompt.removesuffix("=").split("+")
        assert not {f"{a}+{b}=", f"{b}+{a}="} & known
    lists = WordLists()
    assert not {e.prompt for e in lists.training(0)} & {e.prompt for e in lists.held_out()}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_corrupted_exercise_keeps_the_prompt_but_not_the_reference_answer(pair: Pair) -> None:
    task, random = pair.student.task, Random(0)
    exercise = task.held_out()[0]
    shown = [task.warm_start(exercise, random) for _ in range(200)]
    assert {corrupted.prompt for corrupted in shown} == {exercise.prompt}
    assert sum(corrupted.completion == exercise.completion for corrupted in shown) < 40


def test_replace_tokens_replaces_completion_tokens_by_any_number() -> None:
    side = PAIRS["numerals_to_digits"].teachers["teacher"]
    encoder = Encoder(side.tokenizer())
    batch = supervised_batch(encoder, side.task.training(0)[:300], 0.0, Random(0))
    wrong = torch.tensor(side.task.wrong_ids(encoder))
    assert len({*wrong.tolist()}) == 1_000
    torch.manual_seed(0)
    read = replace_tokens(batch, wrong, 0.5, encoder.end_of_turn)
    replaced = read != batch.token_ids
    completion = (batch.labels != IGNORED) & (batch.labels != encoder.end_of_turn)
    assert not (replaced & ~completion).any()
    assert 0.4 < replaced.sum() / completion.sum() < 0.6
    assert torch.isin(read[replaced], wrong).all()
    assert torch.equal(replace_tokens(batch, wrong, 0.0, encoder.end_of_turn), batch.token_ids)


def test_reference_sampler_returns_the_reference_answers(root: Path) -> None:
    pair = trained("digits_to_numerals", root)
    run = Run(pair, "sft", seed=0, evaluations=1)
    student = Student.load(student_config(run, Folders(root).models))
    exercises = pair.student.task.training(0)[70:75]
    prompts = [
        Prompt(index=at, messages=exercise.messages, teachers={"teacher": 1.0})
        for at, exercise in enumerate(exercises)
    ]
    config = RolloutConfig(max_new_tokens=4)
    written = ReferenceSampler(student, config, Encoder(pair.student.tokenizer()), exercises)
    rollouts = written.sample_batch(prompts, step=0, batch=0)
    assert [r.completion.text.decode() for r in rollouts] == [e.completion for e in exercises]
    assert all(rollout.completion.ends_turn for rollout in rollouts)
    assert all(len(rollout.completion) == 2 for rollout in rollouts)


def test_losses_have_distinct_settings() -> None:
    settings = [loss_settings(name).model_dump_json() for name in LOSSES if name != "sft"]
    assert len({*settings}) == len(settings)


@pytest.mark.slow
def test_interrupted_comparison_resumes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair, folders = trained("digits_to_numerals", root), Folders(root)
    done = Run(pair, "prefix_kl", seed=0, evaluations=2)
    result = distil(done, folders.models, silent)
    assert [point["step"] for point in result["curve"]] == [0, 1, 2]
    folders.result(done).parent.mkdir(parents=True, exist_ok=True)
    result["curve"][-1]["accuracies"]["teacher"] = 0.625
    folders.result(done).write_text(json.dumps(result))

    options = "--pairs digits_to_numerals --losses prefix_kl,sft --seeds 1 --evaluations 2"
    shorter = f"--steps 2 --model-steps 2 --processes 1 --runs {root} --json {root}/out.json"
    main([*options.split(), *shorter.split()])

    report = json.loads((root / "out.json").read_text())
    losses = report["pairs"]["digits_to_numerals"]["losses"]
    assert losses["prefix_kl"]["after"]["teacher"] == {
        "mean": 0.625,
        "lowest": 0.625,
        "highest": 0.625,
        "seeds": 1,
    }
    assert [run["loss"] for run in report["runs"]] == ["prefix_kl", "sft"]
    assert losses["sft"]["loss"] > 0
    assert (root / "out.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "1 of 2 runs are finished already" in output
    assert "62.5" in output
    assert finished(replace(done, evaluations=1), folders) is None
