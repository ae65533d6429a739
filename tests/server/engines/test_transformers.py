"""The engine's rows against a slow reference, and what must not change them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines import transformers as transformers_engine
from mopd_server.engines.base import EngineDead, ScoringTask
from mopd_server.engines.transformers import TransformersEngine
from mopd_server.scoring.loading import load_service
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.reference.teacher_scores import completion_logprobs, tail_logprob
from tests.server.tiny_teachers import FAMILIES, TinyTeacher, teacher_of, teacher_of_family

PROMPT, COMPLETION = [40, 9, 77, 120], [55, 300, 8, 8, 201, 31]
TOP_K = 7


def task(
    prompt: Sequence[int] = PROMPT,
    completion: Sequence[int] = COMPLETION,
    candidates: Sequence[Sequence[int]] | None = None,
) -> ScoringTask:
    """A scoring task from plain lists."""
    rows = candidates and tuple(np.array(row, dtype=np.int32) for row in candidates)
    return ScoringTask(
        np.array(prompt, dtype=np.int32), np.array(completion, dtype=np.int32), rows or None
    )


def score(
    teacher: TinyTeacher, *tasks: ScoringTask, temperature: float = 1.0
) -> list[TopKLogprobs]:
    return teacher.engine.score(tasks, top_k=TOP_K, temperature=temperature)


def assert_rows_are(
    rows: TopKLogprobs, expected: list[dict[int, float]], tokens: list[int]
) -> None:
    """Every kept entry, token and tail of ``rows`` is what the reference says."""
    assert len(rows) == len(expected)
    for row, distribution in enumerate(expected):
        ids = rows.ids[row].tolist()
        best = sorted(distribution.values(), reverse=True)[: rows.k]
        np.testing.assert_allclose(rows.logprobs[row], best, atol=2e-5)
        np.testing.assert_allclose(rows.logprobs[row], [distribution[i] for i in ids], atol=2e-5)
        np.testing.assert_allclose(rows.token_logprobs[row], distribution[tokens[row]], atol=2e-5)
        np.testing.assert_allclose(
            rows.tail_logprobs[row], tail_logprob(distribution, ids), atol=2e-5
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_the_slow_reference_says(
    teachers: dict[str, TinyTeacher], family: str
) -> None:
    teacher = teachers[family]
    (rows,) = score(teacher, task())
    expected = completion_logprobs(teacher.model, PROMPT, COMPLETION, teacher.real_ids)
    assert_rows_are(rows, expected, COMPLETION)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_scores_alone_as_it_scores_among_others(
    teachers: dict[str, TinyTeacher], family: str
) -> None:
    teacher = teachers[family]
    generator = np.random.default_rng(1)
    tasks = [
        task(generator.integers(0, 400, prompt), generator.integers(0, 400, completion))
        for prompt, completion in ((3, 20), (1, 1), (30, 2), (5, 5), (2, 0), (9, 14), (90, 40))
    ]
    together = score(teacher, *tasks)
    for position, one in enumerate(tasks):
        (alone,) = score(teacher, one)
        assert together[position].ids.tolist() == alone.ids.tolist()
        for field in ("logprobs", "token_logprobs", "tail_logprobs"):
            np.testing.assert_allclose(
                getattr(together[position], field), getattr(alone, field), atol=1e-5
            )


def test_row_r_predicts_token_r_from_the_tokens_before_it(qwen_teacher: TinyTeacher) -> None:
    (rows,) = score(qwen_teacher, task())
    for changed in range(len(COMPLETION)):
        completion = [*COMPLETION]
        completion[changed] += 1
        (others,) = score(qwen_teacher, task(completion=completion))
        same = np.isclose(rows.logprobs, others.logprobs, atol=1e-6).all(axis=1)
        assert same[: changed + 1].all()  # the row of the token itself is made before it is seen
        assert not same[changed + 1 :].any()


def test_temperature_divides_the_logits(qwen_teacher: TinyTeacher) -> None:
    (rows,) = score(qwen_teacher, task(), temperature=0.25)
    expected = completion_logprobs(
        qwen_teacher.model, PROMPT, COMPLETION, qwen_teacher.real_ids, temperature=0.25
    )
    assert_rows_are(rows, expected, COMPLETION)


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_padding_rows_of_the_head_change_nothing(garbage: float) -> None:
    tokenizer = tiny_models.digit_tokenizer()
    clean = teacher_of(tiny_models.qwen(tokenizer), tokenizer)
    model = tiny_models.qwen(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(tokenizer) :] = garbage
    dirty = teacher_of(model, tokenizer)
    assert dirty.engine.description.logit_width > len(tokenizer)
    candidates = [[5, 6]] * len(COMPLETION)
    for one in (task(), task(candidates=candidates)):
        (expected,), (rows,) = score(clean, one), score(dirty, one)
        assert rows.ids.tolist() == expected.ids.tolist()
        # Not bit for bit: where two models lie in memory decides how a kernel adds up.
        np.testing.assert_allclose(rows.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(rows.tail_logprobs, expected.tail_logprobs, rtol=0, atol=1e-5)


def test_candidates_are_scored_exactly_and_sorted(qwen_teacher: TinyTeacher) -> None:
    candidates = [[0, 17, 33], [55], [], [419, 0], [1, 2, 3], [8]]
    (rows,) = score(qwen_teacher, task(candidates=candidates))
    expected = completion_logprobs(qwen_teacher.model, PROMPT, COMPLETION, qwen_teacher.real_ids)
    assert rows.k == 3
    for row, (asked, distribution) in enumerate(zip(candidates, expected, strict=True)):
        ids = rows.ids[row].tolist()
        assert ids == sorted(asked, key=distribution.__getitem__, reverse=True) + [-1] * (
            3 - len(asked)
        )
        kept = rows.logprobs[row, : len(asked)]
        np.testing.assert_allclose(kept, [distribution[i] for i in ids[: len(asked)]], atol=2e-5)
        np.testing.assert_allclose(
            rows.tail_logprobs[row], tail_logprob(distribution, asked), atol=2e-5
        )


def test_candidates_and_own_top_k_share_a_batch(qwen_teacher: TinyTeacher) -> None:
    mixed = score(
        qwen_teacher, task(), task(candidates=[[9]] * 6), task(), task(candidates=[[]] * 6)
    )
    assert [rows.k for rows in mixed] == [TOP_K, 1, TOP_K, 0]
    assert mixed[1].ids.tolist() == [[9]] * 6


def test_the_whole_vocabulary_leaves_no_tail(qwen_teacher: TinyTeacher) -> None:
    vocabulary = len(qwen_teacher.real_ids)
    (rows,) = qwen_teacher.engine.score([task()], top_k=vocabulary, temperature=1.0)
    assert sorted(rows.ids[0].tolist()) == qwen_teacher.real_ids
    assert np.isneginf(rows.tail_logprobs).all()
    np.testing.assert_allclose(np.exp(rows.logprobs).sum(axis=1), 1.0, atol=1e-5)


def test_an_empty_completion_has_no_rows(qwen_teacher: TinyTeacher) -> None:
    (rows,) = score(qwen_teacher, task(completion=[]))
    assert rows.ids.shape == (0, TOP_K)


def test_chunks_of_rows_join_without_a_seam(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = score(qwen_teacher, task())
    monkeypatch.setattr(transformers_engine, "ROWS_PER_CHUNK", 4)
    (chunked,) = score(qwen_teacher, task())
    assert chunked.ids.tolist() == whole.ids.tolist()
    np.testing.assert_allclose(chunked.token_logprobs, whole.token_logprobs, atol=1e-6)


def gemma2() -> Gemma2ForCausalLM:
    """Caps its logits after the head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 448, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    return Gemma2ForCausalLM(
        Gemma2Config(
            **sizes,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            final_logit_softcapping=0.05,
        )
    ).eval()


def granite() -> GraniteForCausalLM:
    """Scales its logits after the head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 448, "hidden_size": 32, "intermediate_size": 64}
    return GraniteForCausalLM(
        GraniteConfig(
            **sizes,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            logits_scaling=0.1,
        )
    ).eval()


@pytest.mark.parametrize("make_model", [gemma2, granite])
def test_a_model_that_changes_logits_after_its_head_is_noticed(
    make_model: type, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    teacher = teacher_of(make_model(), tiny_models.digit_tokenizer())
    assert "full logits" in caplog.text
    rows, longer = score(teacher, task(), task(prompt=[*PROMPT, 3, 4, 5]))
    expected = completion_logprobs(teacher.model, PROMPT, COMPLETION, teacher.real_ids)
    assert_rows_are(rows, expected, COMPLETION)
    expected = completion_logprobs(teacher.model, [*PROMPT, 3, 4, 5], COMPLETION, teacher.real_ids)
    assert_rows_are(longer, expected, COMPLETION)


def test_an_ordinary_model_uses_its_head_on_chosen_rows_only(
    qwen_teacher: TinyTeacher, caplog: pytest.LogCaptureFixture
) -> None:
    rows_seen: list[int] = []
    head = qwen_teacher.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, out: rows_seen.append(out.shape[0]))
    score(qwen_teacher, task(), task(prompt=PROMPT * 5))
    hook.remove()
    assert sum(rows_seen) == 2 * len(COMPLETION)


def test_a_head_narrower_than_the_tokenizer_is_refused() -> None:
    model = tiny_models.qwen(tiny_models.digit_tokenizer(300))
    with pytest.raises(DataError, match="cannot serve a tokenizer of 420 ids"):
        teacher_of(model, tiny_models.digit_tokenizer(420))


def test_a_model_folder_is_loaded_in_float32_on_cpu(tmp_path) -> None:
    tokenizer = tiny_models.whole_number_tokenizer()
    model = tiny_models.gpt_neox(tokenizer).bfloat16()
    folder = tiny_models.save(model, tokenizer, tmp_path / "tiny-teacher")
    settings = TeacherSettings(model=str(folder), device="cpu", max_model_len=99)
    manifest = load_service(settings).manifest
    assert (manifest.service, manifest.model, manifest.dtype) == ("tiny-teacher",) * 2 + (
        "float32",
    )
    assert (manifest.max_model_len, manifest.logit_width) == (99, 512)
    as_it_is = TeacherSettings(model=str(folder), device="cpu", dtype="bfloat16")
    assert load_service(as_it_is).manifest.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"max_model_len": 257}, "--max-model-len 257 is more than the 256 positions"),
        ({"device": "toaster"}, "device 'toaster' cannot be used"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_refused(tmp_path, setting, sentence) -> None:
    tokenizer = tiny_models.digit_tokenizer()
    folder = tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, tmp_path / "m")
    with pytest.raises(ConfigError, match=sentence):
        load_service(TeacherSettings(model=str(folder), **setting))


def test_the_engine_satisfies_the_interface(qwen_teacher: TinyTeacher) -> None:
    assert isinstance(qwen_teacher.engine, TransformersEngine)
    description = qwen_teacher.engine.description
    assert description.engine == "transformers"
    assert description.candidate_ids
    assert description.temperature


def test_an_error_of_one_batch_is_not_the_death_of_the_device() -> None:
    teacher = teacher_of_family("qwen")

    def fail(*ignored: object) -> None:
        raise RuntimeError("out of memory")

    hook = teacher.model.base_model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        score(teacher, task())
    assert not isinstance(raised.value, EngineDead)
    hook.remove()
    assert len(score(teacher, task())[0]) == len(COMPLETION)


def test_a_device_that_computes_nothing_any_more_is_dead() -> None:
    teacher = teacher_of_family("qwen")
    teacher.model.to("meta")  # a device on which nothing has a value
    task = ScoringTask(np.array([3], dtype=np.int32), np.array([1], dtype=np.int32))
    with pytest.raises(EngineDead, match="device 'meta' fails every call since"):
        teacher.engine.score([task], top_k=1, temperature=1.0)
