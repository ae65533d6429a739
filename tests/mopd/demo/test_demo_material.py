"""The demo's tasks, tokenizers, models and cache, with two training steps at most."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from mopd.demo.examples import IGNORED, Encoder, supervised_batch
from mopd.demo.model_folder import is_cached
from mopd.demo.models import build_model
from mopd.demo.recipes import RECIPES, STUDENT, SUMS_TEACHER, WORDS_TEACHER, Recipe
from mopd.demo.tasks import (
    TASKS,
    WORDS,
    Exercise,
    TaskName,
    draw_training,
    held_out_exercises,
    with_random_completion,
)
from mopd.demo.teachers import train_model, train_models
from mopd_protocol import DataError, TextEncoder

TINY = replace(SUMS_TEACHER, steps=2, examples_per_step=4)


def exercises_of(task: TaskName, count: int = 200) -> list[Exercise]:
    random = Random(5)
    return [draw_training(task, random) for _ in range(count)]


def ignore_progress(step: int, loss: float) -> None:
    pass


@pytest.mark.parametrize("task", TASKS)
def test_held_out_exercises_are_never_drawn_for_training(task: TaskName) -> None:
    held_out = {exercise.prompt for exercise in held_out_exercises(task, 200, seed=0)}
    assert len(held_out) == 200
    assert held_out.isdisjoint(exercise.prompt for exercise in exercises_of(task, 5000))


def test_a_held_out_sum_is_held_out_in_both_orders() -> None:
    trained = {exercise.prompt for exercise in exercises_of("sums", 5000)}
    for exercise in held_out_exercises("sums", 200, seed=0):
        first, _, second, _ = exercise.prompt.split()
        assert f"{second} + {first} =" not in trained


def test_the_same_seed_draws_the_same_exercises() -> None:
    assert held_out_exercises("words", 20, seed=1) == held_out_exercises("words", 20, seed=1)
    assert held_out_exercises("words", 20, seed=1) != held_out_exercises("words", 20, seed=2)


def test_requesting_too_many_held_out_exercises_raises() -> None:
    with pytest.raises(DataError):
        held_out_exercises("sums", 100_000, seed=0)


def test_the_completions_are_correct() -> None:
    for exercise in exercises_of("sums"):
        first, _, second, _ = exercise.prompt.split()
        assert exercise.completion == str(int(first) + int(second))
    for exercise in exercises_of("words"):
        listed = exercise.prompt.removeprefix("reverse: ").split(" ")
        assert exercise.completion.split(" ") == listed[::-1]


def test_random_completions_have_the_correct_form_and_are_rarely_correct() -> None:
    random = Random(0)
    for task in TASKS:
        exercises = exercises_of(task, 1000)
        replaced = [with_random_completion(exercise, random) for exercise in exercises]
        for right, other in zip(exercises, replaced, strict=True):
            assert other.prompt == right.prompt
            assert len(other.completion_parts) == len(right.completion_parts)
            if task == "sums":
                assert (
                    len(other.completion)
                    == len(right.completion)
                    == len(str(int(other.completion)))
                )
            else:
                assert set(other.completion.split(" ")) <= set(WORDS)
        correct = sum(a == b for a, b in zip(exercises, replaced, strict=True))
        assert correct < 0.1 * len(exercises)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_tokenizer_round_trips_completions_and_other_text(recipe: Recipe) -> None:
    encoder = Encoder(recipe.tokenizer())
    continuations = TextEncoder(encoder.tokenizer.backend_tokenizer, encoder.table)
    texts = [exercise.completion for task in TASKS for exercise in exercises_of(task, 50)]
    for text in [*texts, "Grüße, 漢字 🙂\n\tand  more"]:
        assert encoder.table.sequence(continuations.encode(text)).text.decode() == text


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_parts_are_tokenized_as_in_the_completion(recipe: Recipe) -> None:
    encoder = Encoder(recipe.tokenizer())
    continuations = TextEncoder(encoder.tokenizer.backend_tokenizer, encoder.table)
    for exercise in [*exercises_of("sums", 50), *exercises_of("words", 50)]:
        if recipe is WORDS_TEACHER and exercise.task == "sums":
            continue  # has tokens of several digits, and is never trained on sums
        assert encoder.completion(exercise)[:-1] == continuations.encode(exercise.completion)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_prompts_are_rendered_by_the_chat_template(recipe: Recipe) -> None:
    encoder = Encoder(recipe.tokenizer())
    exercise = exercises_of("words", 1)[0]
    conversation = [message.model_dump() for message in exercise.messages]
    rendered = encoder.tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=True
    )
    assert encoder.prompts([exercise]) == [rendered["input_ids"]]


def test_the_three_tokenizers_differ_and_have_different_end_of_turn_tokens() -> None:
    encoders = [Encoder(recipe.tokenizer()) for recipe in RECIPES]
    assert len({encoder.table.fingerprint for encoder in encoders}) == 3
    assert len({e.tokenizer.convert_ids_to_tokens(e.end_of_turn) for e in encoders}) == 3


def test_every_word_is_one_token_of_the_student_but_not_of_the_words_teacher() -> None:
    spellings = [word for name in WORDS for word in (name, f" {name}")]
    student, teacher = Encoder(STUDENT.tokenizer()), Encoder(WORDS_TEACHER.tokenizer())
    assert all(len(student.part(spelling)) == 1 for spelling in spellings)
    lengths = {spelling: len(teacher.part(spelling)) for spelling in spellings}
    assert 0.05 < sum(length > 1 for length in lengths.values()) / len(lengths) < 0.25
    first_pieces = [teacher.part(spelling)[0] for spelling in spellings]
    assert len(set(first_pieces)) == len(spellings), "two words have a common first piece"


def test_the_student_and_the_sums_teacher_have_single_digits() -> None:
    for recipe in (STUDENT, SUMS_TEACHER):
        encoder = Encoder(recipe.tokenizer())
        assert all(len(encoder.completion(exercise)) == 3 for exercise in exercises_of("sums", 50))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_heads_are_wider_than_tokenizers(recipe: Recipe) -> None:
    tokenizer = recipe.tokenizer()
    model = build_model(recipe.family, tokenizer, seed=0)
    width = model.get_output_embeddings().weight.shape[0]
    assert width > len(tokenizer)
    assert width % 64 == 0


def test_corrupted_inputs_have_correct_labels() -> None:
    encoder = Encoder(STUDENT.tokenizer())
    exercises = exercises_of("words", 50)
    clean = supervised_batch(encoder, exercises, corruption=0.0, random=Random(0))
    trained = clean.labels != IGNORED
    assert torch.equal(clean.token_ids[trained], clean.labels[trained])
    corrupted = supervised_batch(encoder, exercises, corruption=0.5, random=Random(0))
    # Words are single tokens, so the labels do not depend on the inputs.
    assert torch.equal(corrupted.labels, clean.labels)
    wrong = (corrupted.token_ids != clean.token_ids).sum() / (4 * len(exercises))
    assert 0.35 < float(wrong) < 0.6


def test_the_cache_key_changes_with_every_setting() -> None:
    changed = [
        replace(TINY, steps=3),
        replace(TINY, examples_per_step=5),
        replace(TINY, learning_rate=1e-4),
        replace(TINY, corruption=0.5),
        replace(TINY, seed=1),
        replace(TINY, curriculum="words"),
        replace(TINY, family="llama"),
    ]
    keys = {recipe.cache_key() for recipe in [TINY, replace(TINY), *changed]}
    assert len(keys) == 1 + len(changed)


def test_a_trained_model_is_saved_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    steps: list[int] = []
    train_model(TINY, folder, lambda step, loss: steps.append(step))
    train_model(TINY, folder, lambda step, loss: steps.append(step))
    assert steps == [1, 2]
    assert is_cached(TINY, folder)
    assert not is_cached(replace(TINY, seed=1), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    encoder = Encoder(AutoTokenizer.from_pretrained(folder))
    assert encoder.table.fingerprint == Encoder(TINY.tokenizer()).table.fingerprint
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size >= encoder.table.size


def test_a_failed_save_leaves_no_partial_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    train_model(TINY, folder, ignore_progress)

    def fail(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        assert list(folder.iterdir()), "the model is saved before the tokenizer"
        raise OSError("no space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space"):
        train_model(replace(TINY, seed=1), folder, ignore_progress)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert is_cached(TINY, folder), "the previous folder is unchanged"


def test_models_are_trained_in_subprocesses_and_reported(tmp_path: Path) -> None:
    recipes = [TINY, replace(WORDS_TEACHER, steps=2, examples_per_step=4)]
    with open(tmp_path / "console.txt", "w") as file:
        folders = train_models(recipes, tmp_path / "models", Console(file=file), processes=2)
    assert list(folders) == ["sums-teacher", "words-teacher"]
    for recipe in recipes:
        assert is_cached(recipe, folders[recipe.name])
    assert "2/2" in (tmp_path / "console.txt").read_text()
