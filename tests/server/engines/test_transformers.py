"""Tests of the transformers engine against a slow reference, and of its invariances."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines import distributions
from mopd_server.engines import transformers as transformers_engine
from mopd_server.engines.base import EngineCrashError, ScoringTask
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.reference.teacher_scores import completion_logprobs, tail_logprob
from tests.server.tiny_teachers import (
    FAMILIES,
    TinyTeacher,
    short_task,
    teacher_of,
    teacher_of_family,
)

PROMPT, COMPLETION = [40, 9, 77, 120], [55, 300, 8, 8, 201, 31]
TOP_K = 7


def task(
    prompt: Sequence[int] = PROMPT,
    completion: Sequence[int] = COMPLETION,
    candidates: Sequence[Sequence[int]] | None = None,
) -> ScoringTask:
    rows = candidates and tuple(np.array(row, dtype=np.int32) for row in candidates)
    return ScoringTask(
        np.array(prompt, dtype=np.int32), np.array(completion, dtype=np.int32), rows or None
    )


def score(
    teacher: TinyTeacher, *tasks: ScoringTask, temperature: float = 1.0
) -> list[TopKLogprobs]:
    return teacher.engine.score(tasks, top_k=TOP_K, temperature=temperature)


def reference(
    teacher: TinyTeacher, prompt: list[int] = PROMPT, temperature: float = 1.0
) -> list[dict[int, float]]:
    return completion_logprobs(teacher.model, prompt, COMPLETION, teacher.real_ids, temperature)


def assert_rows_equal(rows: TopKLogprobs, expected: list[dict[int, float]]) -> None:
    """Compare entries, token and tail of every row with its distribution."""
    assert len(rows) == len(expected)
    for row, distribution in enumerate(expected):
        ids = rows.ids[row].tolist()
        best = sorted(distribution.values(), reverse=True)[: rows.k]
        np.testing.assert_allclose(rows.logprobs[row], best, atol=2e-5)
        np.testing.assert_allclose(rows.logprobs[row], [distribution[i] for i in ids], atol=2e-5)
        np.testing.assert_allclose(
            rows.token_logprobs[row], distribution[COMPLETION[row]], atol=2e-5
        )
        np.testing.assert_allclose(
            rows.tail_logprobs[row], tail_logprob(distribution, ids), atol=2e-5
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_the_slow_reference(teachers: dict[str, TinyTeacher], family: str) -> None:
    (rows,) = score(teachers[family], task())
    assert_rows_equal(rows, reference(teachers[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_do_not_depend_on_the_rest_of_the_batch(
    teachers: dict[str, TinyTeacher], family: str
) -> None:
    teacher = teachers[family]
    generator = np.random.default_rng(1)
    tasks = [
        task(generator.integers(0, 400, prompt), generator.integers(0, 400, completion))
        for prompt, completion in ((3, 20), (1, 1), (30, 2), (5, 5), (2, 0), (9, 14), (90, 40))
    ]
    for sequence, batched in zip(tasks, score(teacher, *tasks), strict=True):
        (single,) = score(teacher, sequence)
        assert batched.ids.tolist() == single.ids.tolist()
        for field in ("logprobs", "token_logprobs", "tail_logprobs"):
            np.testing.assert_allclose(getattr(batched, field), getattr(single, field), atol=1e-5)


def test_row_r_predicts_token_r_from_the_previous_tokens(qwen_teacher: TinyTeacher) -> None:
    (rows,) = score(qwen_teacher, task())
    for changed in range(len(COMPLETION)):
        completion = [*COMPLETION]
        completion[changed] += 1
        (changed_rows,) = score(qwen_teacher, task(completion=completion))
        equal = np.isclose(rows.logprobs, changed_rows.logprobs, atol=1e-6).all(axis=1)
        assert equal[: changed + 1].all()
        assert not equal[changed + 1 :].any()


def test_temperature_divides_the_logits(qwen_teacher: TinyTeacher) -> None:
    (rows,) = score(qwen_teacher, task(), temperature=0.25)
    assert_rows_equal(rows, reference(qwen_teacher, temperature=0.25))


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_padding_rows_of_the_head_have_no_effect(garbage: float) -> None:
    tokenizer = tiny_models.digit_tokenizer()
    clean = teacher_of(tiny_models.qwen(tokenizer), tokenizer)
    model = tiny_models.qwen(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(tokenizer) :] = garbage
    dirty = teacher_of(model, tokenizer)
    assert dirty.engine.description.logit_width > len(tokenizer)
    candidates = [[5, 6]] * len(COMPLETION)
    for sequence in (task(), task(candidates=candidates)):
        (expected,), (rows,) = score(clean, sequence), score(dirty, sequence)
        assert rows.ids.tolist() == expected.ids.tolist()
        # Not bit for bit: the memory alignment of a model affects the order of sums in kernels.
        np.testing.assert_allclose(rows.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(rows.tail_logprobs, expected.tail_logprobs, rtol=0, atol=1e-5)


def test_candidates_are_scored_exactly_and_sorted(qwen_teacher: TinyTeacher) -> None:
    candidates = [[0, 17, 33], [55], [], [419, 0], [1, 2, 3], [8]]
    (rows,) = score(qwen_teacher, task(candidates=candidates))
    assert rows.k == 3
    for row, (ids, distribution) in enumerate(
        zip(candidates, reference(qwen_teacher), strict=True)
    ):
        ranked = sorted(ids, key=distribution.__getitem__, reverse=True)
        assert rows.ids[row].tolist() == ranked + [-1] * (3 - len(ids))
        logprobs = rows.logprobs[row, : len(ids)]
        np.testing.assert_allclose(logprobs, [distribution[i] for i in ranked], atol=2e-5)
        np.testing.assert_allclose(
            rows.tail_logprobs[row], tail_logprob(distribution, ids), atol=2e-5
        )


def test_candidates_and_top_k_share_a_batch(qwen_teacher: TinyTeacher) -> None:
    mixed = score(
        qwen_teacher, task(), task(candidates=[[9]] * 6), task(), task(candidates=[[]] * 6)
    )
    assert [rows.k for rows in mixed] == [TOP_K, 1, TOP_K, 0]
    assert mixed[1].ids.tolist() == [[9]] * 6


@pytest.mark.parametrize("kind", FAMILIES)
def test_completions_of_one_prompt_have_equal_scores(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = teacher_of_family(kind)
    monkeypatch.setattr(teacher.engine, "_max_batch_tokens", 150)
    draw = np.random.default_rng(0)
    prompt, other = draw.choice(teacher.real_ids, (2, 40)).tolist()
    completions = [draw.choice(teacher.real_ids, rows).tolist() for rows in (7, 1, 12, 5, 5, 1)]
    prompts = [prompt, prompt, other, prompt, other, [5]]
    tasks = [task(*pair) for pair in zip(prompts, completions, strict=True)]
    tasks.append(task(prompt, completions[0], [completions[0]] * 7))
    calls: list[int] = []
    hidden_rows = transformers_engine.hidden_rows

    def recorded(model: Any, shared: Sequence[ScoringTask]) -> torch.Tensor:
        calls.append(len(shared))
        return hidden_rows(model, shared)

    expected = [score(teacher, each)[0] for each in tasks]
    monkeypatch.setattr(transformers_engine, "hidden_rows", recorded)
    for rows, single in zip(score(teacher, *tasks), expected, strict=True):
        np.testing.assert_allclose(rows.token_logprobs, single.token_logprobs, atol=1e-5)
        np.testing.assert_allclose(rows.logprobs, single.logprobs, atol=1e-5)
    assert calls == [3, 2]
    # A single completion of one token each needs no second pass.
    (first, second) = score(teacher, tasks[1], task(prompt, completions[5]))
    np.testing.assert_allclose(first.logprobs, expected[1].logprobs, atol=1e-5)
    np.testing.assert_allclose(second.logprobs, first.logprobs, atol=1e-5)


def test_full_vocabulary_has_no_tail(qwen_teacher: TinyTeacher) -> None:
    vocabulary = len(qwen_teacher.real_ids)
    (rows,) = qwen_teacher.engine.score([task()], top_k=vocabulary, temperature=1.0)
    assert sorted(rows.ids[0].tolist()) == qwen_teacher.real_ids
    assert np.isneginf(rows.tail_logprobs).all()
    np.testing.assert_allclose(np.exp(rows.logprobs).sum(axis=1), 1.0, atol=1e-5)


def test_empty_completion_has_no_rows(qwen_teacher: TinyTeacher) -> None:
    (rows,) = score(qwen_teacher, task(completion=[]))
    assert rows.ids.shape == (0, TOP_K)


def test_chunks_of_rows_do_not_affect_the_scores(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rows,) = score(qwen_teacher, task())
    monkeypatch.setattr(distributions, "_MOST_CHUNK_ROWS", 4)
    (chunked,) = score(qwen_teacher, task())
    assert chunked.ids.tolist() == rows.ids.tolist()
    np.testing.assert_allclose(chunked.token_logprobs, rows.token_logprobs, atol=1e-6)


SIZES: dict[str, Any] = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=0.05)),
        (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=0.1)),
    ],
)
def test_model_that_changes_logits_after_its_head_is_detected(
    kind: type, config: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    torch.manual_seed(0)
    teacher = teacher_of(kind(config).eval(), tiny_models.digit_tokenizer())
    assert "full logits" in caplog.text
    prompt = [*PROMPT, 3, 4, 5]
    rows, longer = score(teacher, task(), task(prompt=prompt))
    assert_rows_equal(rows, reference(teacher))
    assert_rows_equal(longer, reference(teacher, prompt))


def test_head_of_an_ordinary_model_runs_on_completion_rows_only(qwen_teacher: TinyTeacher) -> None:
    row_counts: list[int] = []
    head = qwen_teacher.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, out: row_counts.append(out.shape[0]))
    score(qwen_teacher, task(), task(prompt=PROMPT * 5))
    hook.remove()
    assert sum(row_counts) == 2 * len(COMPLETION)


def test_head_narrower_than_the_tokenizer_is_an_error() -> None:
    model = tiny_models.qwen(tiny_models.digit_tokenizer(300))
    with pytest.raises(DataError, match="420"):
        teacher_of(model, tiny_models.digit_tokenizer(420))


def test_model_folder_is_loaded_in_float32_on_a_cpu(tmp_path) -> None:
    tokenizer = tiny_models.whole_number_tokenizer()
    model = tiny_models.gpt_neox(tokenizer).bfloat16()
    folder = tiny_models.save(model, tokenizer, tmp_path / "tiny-teacher")
    settings = TeacherSettings(model=str(folder), device="cpu", max_model_len=99)
    manifest = TeacherService.load(settings).manifest
    assert (manifest.service, manifest.model) == ("tiny-teacher", "tiny-teacher")
    assert (manifest.dtype, manifest.max_model_len, manifest.logit_width) == ("float32", 99, 512)
    explicit = TeacherSettings(model=str(folder), device="cpu", dtype="bfloat16")
    assert TeacherService.load(explicit).manifest.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("key", "value", "text"), [("max_model_len", 257, "256"), ("device", "toaster", "toaster")]
)
def test_setting_that_does_not_fit_the_model_is_an_error(
    key: str, value: object, text: str, tmp_path
) -> None:
    tokenizer = tiny_models.digit_tokenizer()
    folder = tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, tmp_path / "m")
    with pytest.raises(ConfigError) as caught:
        TeacherService.load(TeacherSettings(model=str(folder), **{key: value}))
    assert caught.value.key == key
    assert text in str(caught.value)


def test_error_of_one_batch_is_not_a_crash() -> None:
    teacher = teacher_of_family("qwen")

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    hook = teacher.model.base_model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        score(teacher, task())
    assert not isinstance(caught.value, EngineCrashError)
    hook.remove()
    assert len(score(teacher, task())[0]) == len(COMPLETION)


def test_device_that_fails_every_call_is_a_crash() -> None:
    teacher = teacher_of_family("qwen")
    teacher.model.to("meta")  # a device without values
    with pytest.raises(EngineCrashError, match="device 'meta'"):
        teacher.engine.score([short_task(3)], top_k=1, temperature=1.0)


def test_rows_in_gaps_and_behind_the_tokenizer_have_no_probability() -> None:
    """The largest logits are those of rows without a token."""
    tokenizer = tiny_models.tokenizer_with_gaps()
    model = tiny_models.qwen(tokenizer)
    present = np.sort([*tokenizer.get_vocab().values()])
    without = np.setdiff1d(np.arange(model.config.vocab_size), present)
    gap, behind = int(without[0]), int(without[-1])
    assert gap < present[-1] < behind
    with torch.no_grad():
        model.get_output_embeddings().weight[without] *= 20
    teacher = teacher_of(model, tokenizer)
    assert teacher.service.manifest.max_top_k == len(present)
    completion = [7, gap, 8, behind]
    rows = [[gap, 7, behind]] * len(completion)
    for scores in (
        *score(teacher, task([5, gap], completion)),
        *score(teacher, task([5, gap], completion, rows)),
    ):
        assert np.isneginf(scores.token_logprobs).tolist() == [False, True, False, True]
        assert not np.isin(scores.ids, without).any()
        total = np.exp(scores.logprobs.astype(float)).sum(axis=1) + np.exp(scores.tail_logprobs)
        np.testing.assert_allclose(total, 1, atol=1e-5)
