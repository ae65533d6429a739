"""Tests of scoring rollouts with teachers: requests, weights, failures; real services."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mopd_protocol.errors import (
    ConfigError,
    TeacherError,
    TeacherMismatchError,
    VerificationError,
)
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Message, Rollout
from mopd_trainer.config.run import TeacherConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import teacher_pool
from mopd_trainer.teachers.scoring import RolloutScorer
from tests import tiny_models
from tests.client.lying_proxy import serving
from tests.reference.teacher_scores import completion_logprobs
from tests.server.tiny_teachers import TinyTeacher, teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.students import ids_of, rollout, table, tokenizer

pytestmark = pytest.mark.anyio

IDENTITY = StudentIdentity(
    tokenizer("digit"), table("digit"), logit_width=448, parameters=0, trained=0
)
TOKEN_LOSS = {"loss": {"type": "topk_kl"}}

Teachers = dict[str, tuple[Recorded, TeacherConfig]]


@cache
def service(name: str) -> TinyTeacher:
    """Return a teacher with the student's tokenizer, or one of two with others."""
    make = {
        "digit": tiny_models.qwen,
        "sentencepiece": tiny_models.llama,
        "whole_number": tiny_models.gpt_neox,
    }[name]
    return teacher_of(make(tokenizer(name)), tokenizer(name))


def teacher_with(name: str, **settings: Any) -> tuple[Recorded, TeacherConfig]:
    return Recorded(service(name).app), teacher_config(**settings)


def written(text: str, index: int = 0, **teachers: float) -> Rollout:
    return rollout("digit", ids_of("digit", text, "<|end|>"), teachers=teachers, index=index)


async def scored(
    teachers: Teachers, rollouts: Sequence[Rollout]
) -> tuple[list[TrainingExample], RolloutScorer]:
    async with scorer_of(IDENTITY, teachers) as scorer:
        return await scorer.score(rollouts), scorer


async def test_each_sample_is_scored_by_its_teacher() -> None:
    teachers = {"math": teacher_with("sentencepiece"), "code": teacher_with("whole_number")}
    owners = ["math", "code", "code", "math", "code"]
    rollouts = [written(f"completion {at}", at, **{name: 1.0}) for at, name in enumerate(owners)]
    examples, _ = await scored(teachers, rollouts)
    for name, (transport, _) in teachers.items():
        expected_texts = [f"completion {at}" for at, owner in enumerate(owners) if owner == name]
        assert [sequence["completion"] for sequence in transport.sequences] == expected_texts
        assert len(transport.requests) == 1
    assert [example.rollout.prompt.index for example in examples] == [0, 1, 2, 3, 4]
    assert [[j.teacher for j in e.scores] for e in examples] == [[name] for name in owners]
    for example in examples:
        [aligned_score] = example.scores
        name = "sentencepiece" if aligned_score.teacher == "math" else "whole_number"
        assert aligned_score.score.completion.text == example.rollout.completion.text
        again = table(name).sequence(aligned_score.score.completion.token_ids)
        assert again.text == example.rollout.completion.text


async def test_two_teachers_of_a_sample_keep_their_weights_and_order() -> None:
    teachers = {"math": teacher_with("sentencepiece"), "code": teacher_with("whole_number")}
    [example], _ = await scored(teachers, [written("12 + 30", code=1.0, math=3.0)])
    assert [(j.teacher, j.weight) for j in example.scores] == [("code", 0.25), ("math", 0.75)]
    assert all(len(transport.sequences) == 1 for transport, _ in teachers.values())


async def test_teacher_with_another_tokenizer_receives_no_student_ids() -> None:
    transport, config = teacher_with("whole_number")
    pieces = ["1999.50 ", "<|user|>", " 的", "<|end|>"]
    sampled = rollout("digit", ids_of("digit", *pieces), teachers={"code": 1.0})
    await scored({"code": (transport, config)}, [sampled, written("x", code=1.0)])
    for sequence in transport.sequences:
        assert set(sequence) == {"id", "messages", "completion", "finished"}
    assert transport.sequences[0]["completion"] == ["1999.50 ", {"control": "<|user|>"}, " 的"]


async def test_control_tokens_are_sent_by_the_vocabulary_of_each_teacher() -> None:
    teachers = {"other": teacher_with("sentencepiece"), "same": teacher_with("digit", loss="ctkd")}
    ids = ids_of("digit", "a", "<|pad|>", "b")
    [example], _ = await scored(teachers, [rollout("digit", ids, teachers={"other": 1, "same": 1})])
    sent = {name: transport.sequences[0]["completion"] for name, (transport, _) in teachers.items()}
    assert sent == {"other": "a<|pad|>b", "same": ["a", {"control": "<|pad|>"}, "b"]}
    assert [
        aligned_score.teacher_input.control_tokens_as_text for aligned_score in example.scores
    ] == [
        1,
        0,
    ]


async def test_teacher_with_the_same_tokenizer_receives_the_ids() -> None:
    transport, config = teacher_with("digit", **TOKEN_LOSS)
    # Ids that the tokenizer itself would never make of this text.
    ids = [*ids_of("digit", b"the", b"\xe7", "<|pad|>"), *ids_of("digit", "<|end|>")]
    sampled = rollout("digit", ids, teachers={"math": 1.0})
    [example], _ = await scored({"math": (transport, config)}, [sampled])
    [sequence] = transport.sequences
    assert set(sequence) == {"id", "messages", "completion_token_ids", "finished"}
    assert sequence["completion_token_ids"] == ids[:-1]
    [aligned_score] = example.scores
    assert aligned_score.score.completion.token_ids.tolist() == ids
    spans = zip(
        aligned_score.alignment.student_starts, aligned_score.alignment.teacher_ends, strict=True
    )
    assert [(int(start), int(end)) for start, end in spans] == [(r, r + 1) for r in range(len(ids))]


async def test_scores_are_the_teachers_distributions_at_the_configured_k_and_temperature() -> None:
    transport, config = teacher_with("digit", top_k=5, temperature=0.5, **TOKEN_LOSS)
    sampled = written("7 + 8", math=1.0)
    [example], _ = await scored({"math": (transport, config)}, [sampled])
    assert (transport.requests[0]["top_k"], transport.requests[0]["temperature"]) == (5, 0.5)
    teacher = service("digit")
    prompt = tokenizer("digit").apply_chat_template(
        transport.sequences[0]["messages"], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer("digit")(prompt, add_special_tokens=False)["input_ids"]
    expected = completion_logprobs(
        teacher.model, prompt_ids, sampled.completion.token_ids.tolist(), teacher.real_ids, 0.5
    )
    topk = example.scores[0].score.topk
    best = [sorted(row.values(), reverse=True)[:5] for row in expected]
    np.testing.assert_allclose(topk.logprobs, best, atol=2e-5)


@pytest.mark.parametrize("on_error", ["fail", "drop"])
async def test_only_the_too_long_sample_is_dropped_and_counted(on_error: str) -> None:
    teachers = {"code": teacher_with("whole_number", on_error=on_error)}
    rollouts = [written("a" if at != 1 else "x9" * 200, at, code=1.0) for at in range(4)]
    examples, scorer = await scored(teachers, rollouts)
    assert [example.rollout.prompt.index for example in examples] == [0, 2, 3]
    assert scorer.dropped == {"code/too_long": 1, "total": 1}


def picky(on_error: str) -> tuple[Recorded, TeacherConfig]:
    """Return a teacher whose chat template rejects system turns."""
    own: PreTrainedTokenizerFast = tiny_models.whole_number_tokenizer()
    own.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + str(own.chat_template)
    )
    app = teacher_of(tiny_models.gpt_neox(own), own).app
    return Recorded(app), teacher_config(on_error=on_error)


def with_a_system_turn(index: int) -> Rollout:
    turns = (Message(role="system", content="be brief"), Message(role="user", content="?"))
    ids = ids_of("digit", "a")
    return rollout("digit", ids, teachers={"code": 1.0}, index=index, messages=turns)


async def test_only_the_rejected_sample_is_dropped_with_on_error_drop() -> None:
    rollouts = [written("a", 0, code=1.0), with_a_system_turn(1), written("b", 2, code=1.0)]
    examples, scorer = await scored({"code": picky("drop")}, rollouts)
    assert [example.rollout.prompt.index for example in examples] == [0, 2]
    assert scorer.dropped == {"code/refused": 1, "total": 1}
    with pytest.raises(TeacherError, match=r"teacher 'code' at .* status 422: .*no system"):
        await scored({"code": picky("fail")}, rollouts)


def changing(**settings: Any) -> tuple[Recorded, TeacherConfig]:
    """Return a teacher whose temperature changes with every request."""
    model = tiny_models.gpt_neox(tokenizer("whole_number"))
    teacher = teacher_of(model, tokenizer("whole_number"))

    def change() -> None:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.3)

    return Recorded(teacher.app, on_scoring=change), teacher_config(**settings)


@pytest.mark.parametrize("on_error", ["drop", "wait", "fail"])
async def test_contradicting_scores_end_the_run(on_error: str) -> None:
    rollouts = [written("a fox", 0, code=1.0), written("a dog", 1, code=1.0)]
    examples, _ = await scored({"code": changing(on_error=on_error, verify=0)}, rollouts)
    assert len(examples) == 2
    with pytest.raises(VerificationError) as caught:
        await scored({"code": changing(on_error=on_error, verify=1e-9)}, rollouts)
    assert caught.value.code == "contradicting_scores"


async def test_the_settings_of_verification_reach_the_client() -> None:
    sequences = [SequenceRequest(prompt="the", completion="fox" + i) for i in "0123456789"]
    with serving(service("digit").app) as url:
        counts: list[tuple[int, int]] = []
        for verify, seed in ((0, 0), (0.3, 0), (0.3, 0), (0.3, 1)):
            configs = {"math": teacher_config(url=url, verify=verify)}
            async with teacher_pool(configs, seed=seed) as pool:
                await pool.score("math", sequences, top_k=4)
                counters = pool.client("math").counters
                counts.append((counters.spot_checks, counters.spot_check_tokens))
    assert counts[0] == (0, 0)
    assert counts[1] == counts[2] != counts[3]


async def test_samples_of_an_unavailable_teacher_are_dropped_or_end_the_run() -> None:
    for on_error in ("drop", "fail"):
        teachers = {
            "math": teacher_with("sentencepiece"),
            "code": teacher_with("whole_number", on_error=on_error),
        }
        rollouts = [
            written("a", 0, math=1.0),
            written("b", 1, code=1.0),
            written("c", 2, code=1.0, math=1.0),
        ]
        async with scorer_of(IDENTITY, teachers) as scorer:
            teachers["code"][0].broken = True
            if on_error == "drop":
                examples = await scorer.score(rollouts)
                # The third has two teachers, and is dropped as one of them is unavailable.
                assert [example.rollout.prompt.index for example in examples] == [0]
                assert scorer.dropped == {"code/unavailable": 2, "total": 2}
            else:
                with pytest.raises(TeacherError, match=r"teacher 'code' at .* is unreachable"):
                    await scorer.score(rollouts)


async def test_sample_that_two_teachers_cannot_score_is_dropped_once() -> None:
    teachers = {name: teacher_with("whole_number", on_error="drop") for name in ("math", "code")}
    async with scorer_of(IDENTITY, teachers) as scorer:
        for transport, _ in teachers.values():
            transport.broken = True
        rollouts = [written("a", 0, math=1.0, code=1.0), written("b", 1, math=1.0)]
        assert await scorer.score(rollouts) == []
    assert scorer.dropped == {"math/unavailable": 2, "code/unavailable": 1, "total": 2}


async def test_on_error_wait_retries_until_the_teacher_is_available(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One attempt a call: its deadline has no room for a pause.
    for pause in ("FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(f"mopd_client.transport.retry.{pause}", 61.0)
    settings = {"on_error": "wait", "deadline_seconds": 60.0}
    teachers = {"code": teacher_with("whole_number", **settings)}
    async with scorer_of(IDENTITY, teachers) as scorer:
        transport = teachers["code"][0]
        transport.failures = 20
        [example] = await scorer.score([written("a", code=1.0)])
        counters = scorer.counters("code")
        assert counters.waits >= 20
        assert counters.failures == counters.waits
    assert [aligned_score.teacher for aligned_score in example.scores] == ["code"]
    assert not scorer.dropped
    lines = [record.message for record in caplog.records if "waiting" in record.message]
    assert lines[0].startswith("waiting for teacher 'code', 0 s so far: teacher 'code' at http")
    assert 2 <= len(lines) < 10  # one in a while, not one a call
    assert "teacher 'code' is available after 1" in caplog.text


async def test_on_error_wait_ends_when_the_available_teacher_rejects() -> None:
    rollouts = [written("a", 0, code=1.0), with_a_system_turn(1)]
    with pytest.raises(TeacherError, match=r"teacher 'code' at .* status 422: .*no system"):
        await scored({"code": picky("wait")}, rollouts)


async def test_fallback_scores_with_its_settings_and_the_unavailable_teachers_weight() -> None:
    teachers = {
        "math": teacher_with("sentencepiece", on_error="fallback:code", top_k=3),
        "code": teacher_with("whole_number", top_k=5),
        "general": teacher_with("digit"),
    }
    async with scorer_of(IDENTITY, teachers) as scorer:
        teachers["math"][0].broken = True
        rollouts = [written("a", 0, math=3.0, general=1.0), written("b", 1, general=1.0)]
        examples = await scorer.score(rollouts)
        assert scorer.counters("math").fallbacks == 1
    [aligned_score, other] = examples[0].scores
    assert (aligned_score.teacher, aligned_score.weight) == ("code", 0.75)
    assert (other.teacher, other.weight) == ("general", 0.25)
    assert teachers["code"][0].requests[0]["top_k"] == 5
    assert aligned_score.score.manifest_id == service("whole_number").service.manifest.manifest_id
    assert len(examples) == 2
    assert not scorer.dropped


async def test_fallback_that_scores_the_sample_already_adds_the_weight() -> None:
    teachers = {
        "math": teacher_with("sentencepiece", on_error="fallback:code"),
        "code": teacher_with("whole_number"),
    }
    async with scorer_of(IDENTITY, teachers) as scorer:
        teachers["math"][0].broken = True
        [example] = await scorer.score([written("a", math=3.0, code=1.0)])
    assert [(j.teacher, j.weight) for j in example.scores] == [("code", 1.0)]


async def test_only_rejected_samples_are_sent_to_the_fallback() -> None:
    teachers = {"code": picky("fallback:math"), "math": teacher_with("sentencepiece")}
    rollouts = [written("a", 0, code=1.0), with_a_system_turn(1), written("x9" * 200, 2, code=1.0)]
    examples, scorer = await scored(teachers, rollouts)
    # The last is too long for either.
    assert [[j.teacher for j in e.scores] for e in examples] == [["code"], ["math"]]
    assert scorer.counters("code").fallbacks == 2
    assert scorer.dropped == {"math/too_long": 1, "total": 1}


async def test_last_teacher_of_a_chain_of_fallbacks_decides_the_failure() -> None:
    for last in ("drop", "fail"):
        teachers = {
            "math": teacher_with("sentencepiece", on_error="fallback:code"),
            "code": teacher_with("whole_number", on_error="fallback:general"),
            "general": teacher_with("digit", on_error=last),
        }
        async with scorer_of(IDENTITY, teachers) as scorer:
            for transport, _ in teachers.values():
                transport.broken = True
            if last == "drop":
                assert await scorer.score([written("a", math=1.0)]) == []
                assert scorer.dropped == {"general/unavailable": 1, "total": 1}
                assert [scorer.counters(n).fallbacks for n in teachers] == [1, 1, 0]
            else:
                with pytest.raises(TeacherError, match=r"teacher 'general' at .* is unreachable"):
                    await scorer.score([written("a", math=1.0)])


def decomposed() -> Rollout:
    """A completion of one character that the teacher's normalizer composes."""
    return rollout("digit", ids_of("digit", "e\u0301"), teachers={"code": 1.0})


async def test_tokens_behind_an_incomplete_character_are_compared() -> None:
    transport, config = teacher_with("whole_number", loss="prefix_kl")
    ids = ids_of("digit", "ab ", b"\xe7\x9a", " 12", "<|end|>")
    sampled = rollout("digit", ids, teachers={"code": 1.0})
    [example], _ = await scored({"code": (transport, config)}, [sampled])
    [sequence] = transport.sequences
    assert set(sequence) == {"id", "messages", "completion_token_ids", "finished"}
    [score] = example.scores
    assert score.score.completion.text == score.teacher_input.completion.text
    assert int(score.alignment.student_ends[-1]) == len(ids)
    assert int(score.alignment.teacher_ends[-1]) == len(score.score.completion)


async def test_a_sample_of_which_nothing_aligns_is_dropped_and_counted() -> None:
    examples, scorer = await scored(
        {"code": teacher_with("whole_number")}, [decomposed(), written("b", 1, code=1.0)]
    )
    assert [example.rollout.prompt.index for example in examples] == [1]
    assert scorer.dropped == {"code/nothing_aligned": 1, "total": 1}


async def test_a_batch_of_which_nothing_aligns_is_no_error() -> None:
    examples, scorer = await scored({"code": teacher_with("whole_number")}, [decomposed()])
    assert examples == []
    assert scorer.dropped == {"code/nothing_aligned": 1, "total": 1}


async def test_no_request_without_rollouts() -> None:
    transport, config = teacher_with("whole_number")
    assert (await scored({"code": (transport, config)}, []))[0] == []
    assert transport.requests == []


async def test_same_tokenizer_loss_rejects_a_teacher_with_another() -> None:
    with pytest.raises(ConfigError) as caught:
        await scored({"math": teacher_with("whole_number", **TOKEN_LOSS)}, [])
    assert caught.value.key == "teachers.math.loss.type"


async def test_teacher_with_a_smaller_top_k_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"teacher 'math' at .*: top_k exceeds"):
        await scored({"math": teacher_with("digit", top_k=100_000)}, [])


async def test_settings_of_a_teacher_reach_its_requests() -> None:
    settings = {"teacher_temperature": 0.5, "chat_template_kwargs": {"enable_thinking": False}}
    for loss in ({}, TOKEN_LOSS):
        transport, config = teacher_with("digit", **settings, **loss)
        await scored({"math": (transport, config)}, [written("7", math=1.0)])
        assert transport.requests[0]["temperature"] == 0.5
        variables = [sequence["chat_template_kwargs"] for sequence in transport.sequences]
        assert variables == [{"enable_thinking": False}]
        assert config.temperature == 1.0


async def test_another_model_at_the_address_is_a_mismatch() -> None:
    rollouts = [written("7", math=1.0)]
    for key, value in (("model", "tiny"), ("model", "org/tiny"), ("revision", "no")):
        await scored({"math": teacher_with("digit", **{key: value})}, rollouts)
    for key in ("model", "revision"):
        with pytest.raises(TeacherMismatchError) as caught:
            await scored({"math": teacher_with("digit", **{key: "other"})}, rollouts)
        assert caught.value.key == f"teachers.math.{key}"
