"""The comparison of losses on numerals: its material, one step of it, and the whole, tiny."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from bench.numerals.__main__ import main
from bench.numerals.distillation import RightAnswers, Run, distil, student_config
from bench.numerals.exercises import ADDENDS, Sums, WordLists
from bench.numerals.material import Role, misread, train_model
from bench.numerals.matrix import Folders, finished
from bench.numerals.numeral_tokenizers import STUDENT_NAMES, digit_tokenizer, numeral_tokenizer
from bench.numerals.pairs import LOSSES, PAIRS, Pair, loss_settings, shortened
from bench.numerals.report import summary, table
from mopd.demo.examples import IGNORED, Encoder, supervised_batch
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.student.student import Student


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and results lie."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("numerals")


def trained(name: str, root: Path, *, steps: int = 2, model_steps: int = 2) -> Pair:
    """A pair whose models have hardly been trained, and are in their folders."""
    pair = shortened(PAIRS[name], steps, model_steps)
    roles: tuple[Role, ...] = ("teacher", "student")
    for role in roles:
        train_model(pair, role, 0, Folders(root).models, lambda done, steps: None)
    return pair


def silent(done: int, loss: float, accuracy: float) -> None:
    """Nobody listens."""


def test_every_number_is_one_token_for_one_tokenizer_and_digits_for_the_other() -> None:
    digits, numerals = (
        Encoder(make(STUDENT_NAMES)) for make in (digit_tokenizer, numeral_tokenizer)
    )
    for number in range(1_000):
        text = str(number)
        assert [numerals.table.all_bytes[i] for i in numerals.part(text)] == [text.encode()]
        assert [digits.table.all_bytes[i] for i in digits.part(text)] == [c.encode() for c in text]


def test_what_is_held_out_is_never_trained_on_not_even_the_other_way_round() -> None:
    task = Sums(whole_numbers=True)
    known = {exercise.question for exercise in task.training(seed=3)}
    unseen = {exercise.question for exercise in task.held_out()}
    assert len(known) + len(unseen) == len(ADDENDS) ** 2
    assert 0.1 < len(unseen) / len(ADDENDS) ** 2 < 0.3
    for question in unseen:
        a, b = question.removesuffix("=").split("+")
        assert not {f"{a}+{b}=", f"{b}+{a}="} & known
    lists = WordLists()
    assert not {e.question for e in lists.training(0)} & {e.question for e in lists.held_out()}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_form_alone_does_not_tell_the_answer(pair: Pair) -> None:
    task, random = pair.student.task, Random(0)
    exercise = task.held_out()[0]
    shown = [task.in_form_alone(exercise, random) for _ in range(200)]
    assert {one.question for one in shown} == {exercise.question}
    assert sum(one.answer == exercise.answer for one in shown) < 40


def test_a_teacher_reads_any_number_where_a_student_might_have_written_it() -> None:
    side = PAIRS["numerals_to_digits"].teacher
    encoder = Encoder(side.tokenizer())
    batch = supervised_batch(encoder, side.task.training(0)[:300], 0.0, Random(0))
    wrong = torch.tensor(side.task.wrong_ids(encoder))
    assert len({*wrong.tolist()}) == 1_000
    torch.manual_seed(0)
    read = misread(batch, wrong, 0.5, encoder.end_of_turn)
    replaced = read != batch.token_ids
    answers = (batch.labels != IGNORED) & (batch.labels != encoder.end_of_turn)
    assert not (replaced & ~answers).any()
    assert 0.4 < replaced.sum() / answers.sum() < 0.6
    assert torch.isin(read[replaced], wrong).all()
    assert torch.equal(misread(batch, wrong, 0.0, encoder.end_of_turn), batch.token_ids)


@pytest.mark.slow
def test_equal_tokenizers_give_all_kls_the_same_first_loss(root: Path) -> None:
    pair = trained("equal", root, steps=1, model_steps=100)  # it writes digits by then
    losses = {
        name: distil(Run(pair, name, seed=0, evaluations=1), Folders(root).models, silent)
        for name in ("topk_kl", "ctkd", "prefix_kl")
    }
    first = losses["topk_kl"]["first_loss"]
    assert first > 0.01
    for result in losses.values():
        assert result["first_loss"] == pytest.approx(first, rel=1e-6)


def test_right_answers_stand_in_for_what_the_student_would_write(root: Path) -> None:
    pair = trained("digits_to_numerals", root)
    run = Run(pair, "sft", seed=0, evaluations=1)
    student = Student.load(student_config(run, Folders(root).models))
    exercises = pair.student.task.training(0)[70:75]
    prompts = [
        Prompt(index=at, messages=exercise.messages, teachers={"teacher": 1.0})
        for at, exercise in enumerate(exercises)
    ]
    config = RolloutConfig(max_new_tokens=4)
    written = RightAnswers(student, config, Encoder(pair.student.tokenizer()), exercises)
    rollouts = written.sample(prompts, step=0, batch=0)
    assert [r.completion.text.decode() for r in rollouts] == [e.answer for e in exercises]
    assert all(rollout.completion.ends_turn for rollout in rollouts)
    assert all(len(rollout.completion) == 2 for rollout in rollouts)


def test_every_loss_has_settings_of_its_own() -> None:
    settings = [loss_settings(name).model_dump_json() for name in LOSSES if name != "sft"]
    assert len({*settings}) == len(settings)


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_where_it_stopped(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, folders = trained("digits_to_numerals", root), Folders(root)
    done = Run(pair, "prefix_kl", seed=0, evaluations=2)
    result = distil(done, folders.models, silent)
    assert [point["step"] for point in result["curve"]] == [0, 1, 2]
    folders.result(done).parent.mkdir(parents=True, exist_ok=True)
    folders.result(done).write_text(json.dumps({**result, "accuracy": 0.625}))

    options = "--pairs digits_to_numerals --losses prefix_kl,sft --seeds 1 --evaluations 2"
    shorter = f"--steps 2 --model-steps 2 --processes 1 --runs {root} --json {root}/out.json"
    main([*options.split(), *shorter.split()])

    found = json.loads((root / "out.json").read_text())
    losses = found["pairs"]["digits_to_numerals"]["losses"]
    assert losses["prefix_kl"]["accuracy"] == {
        "mean": 0.625,
        "lowest": 0.625,
        "highest": 0.625,
        "seeds": 1,
    }
    assert [run["loss"] for run in found["runs"]] == ["prefix_kl", "sft"]
    assert losses["sft"]["first_loss"]["mean"] > 0
    assert (root / "out.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "1 of 2 runs are finished already" in told
    assert "62.5%" in told
    assert finished(replace(done, evaluations=1), folders) is None


def test_a_summary_has_means_and_spreads_over_seeds() -> None:
    pair = PAIRS["equal"]
    runs = [
        {
            "pair": "equal",
            "loss": "ctkd",
            "seed": seed,
            "accuracy": accuracy,
            "before": 0.02 * seed,
            "first_loss": 1.0,
            "processor_seconds": {"total": 10.0},
        }
        for seed, accuracy in enumerate([0.5, 0.75, 1.0])
    ]
    found = summary(runs, [pair], {"equal": 0.99})["pairs"]["equal"]
    assert found["losses"]["ctkd"]["accuracy"] == {
        "mean": 0.75,
        "lowest": 0.5,
        "highest": 1.0,
        "seeds": 3,
    }
    assert found["before"]["mean"] == pytest.approx(0.02)
    assert table(summary(runs, [pair], {"equal": 0.99}), "equal").row_count == 3
