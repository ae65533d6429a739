"""A teacher scores exactly the student's most likely ids that a request lists."""

from typing import Any

import numpy as np
import pytest
import torch

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.config import ProjectionSettings, TopKKlConfig
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.manifest import Features
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig, RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.teachers.student_support import Counterparts
from tests.reference.teacher_scores import completion_logprobs
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.runs import run_values
from tests.trainer.students import (
    CPU,
    MESSAGES,
    ids_of,
    rollout,
    student_of,
    table,
    tokenizer,
)
from tests.trainer.teachers.test_scoring import IDENTITY, service

pytestmark = pytest.mark.anyio

TOP_K = 6
SUPPORT = {"support": "student_topk", "top_k": TOP_K}
SAME = {**SUPPORT, "loss": {"type": "topk_kl", "divergence": "reverse_kl"}}
OTHER = {**SUPPORT, "loss": {"type": "ctkd", "divergence": "reverse_kl"}}


def written(*pieces: str | bytes, keep: int = TOP_K, seed: int = 0, **teachers: float) -> Rollout:
    """A rollout whose student had random favourites."""
    ids = ids_of("digit", *pieces)
    generator = np.random.default_rng(seed)
    own = np.stack([generator.permutation(table("digit").size)[:keep] for _ in ids])
    return rollout("digit", ids, teachers=teachers, topk_ids=own.astype(np.int32))


def prompt_ids(name: str) -> list[int]:
    text = tokenizer(name).apply_chat_template(
        [message.model_dump() for message in MESSAGES], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(name)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_rollout_keeps_the_students_most_likely_ids_of_every_token(top_p: float) -> None:
    student = student_of(sharpness=20)
    config = RolloutConfig(max_new_tokens=12, temperature=0.7, top_p=top_p)
    sampler = Sampler(student, config, seed=0, keep_topk=5)
    prompts = [Prompt(n, MESSAGES, {"math": 1.0}) for n in range(3)]
    rollouts = sampler.sample_batch(prompts, step=0, batch=0)

    for built in rollouts:
        ids = built.completion.token_ids.tolist()
        full = [*built.prompt_token_ids.tolist(), *ids]
        with torch.no_grad():
            logits = student.model(torch.tensor([full])).logits[0, -len(ids) - 1 : -1]
        logits = logits[:, : table("digit").size]
        assert built.student_topk_ids is not None
        assert built.student_topk_ids.tolist() == logits.topk(5).indices.tolist()


def test_top_ids_are_only_kept_if_configured_and_change_nothing_else() -> None:
    config = RolloutConfig(max_new_tokens=12)
    prompts = [Prompt(0, MESSAGES, {"math": 1.0})]
    [plain] = Sampler(student_of(), config, seed=0).sample_batch(prompts, step=0, batch=0)
    [kept] = Sampler(student_of(), config, seed=0, keep_topk=10**6).sample_batch(
        prompts, step=0, batch=0
    )
    assert plain.student_topk_ids is None
    assert plain.completion.token_ids.tolist() == kept.completion.token_ids.tolist()
    assert kept.student_topk_ids is not None
    assert kept.student_topk_ids.shape[1] == int(table("digit").present.sum())


def test_ids_that_are_not_one_row_a_token_are_refused() -> None:
    with pytest.raises(DataError, match="2 completion tokens but the student's top-k ids of shape"):
        rollout("digit", [5, 6], topk_ids=np.zeros((1, 4), dtype=np.int32))


async def test_a_teacher_with_the_same_tokenizer_scores_the_students_ids() -> None:
    transport, config = Recorded(service("digit").app), teacher_config(**SAME)
    built = written("7 + 8", "<|end|>", keep=2 * TOP_K, math=1.0)
    async with scorer_of(IDENTITY, {"math": (transport, config)}) as scorer:
        [example] = await scorer.score([built])

    assert built.student_topk_ids is not None
    expected_values = built.student_topk_ids[:, :TOP_K]
    assert transport.sequences[0]["candidate_ids"] == expected_values.tolist()
    actual = example.scores[0].score.topk
    teacher = service("digit")
    rows = completion_logprobs(
        teacher.model,
        prompt_ids("digit"),
        built.completion.token_ids.tolist(),
        teacher.real_ids,
        1.0,
    )
    assert len(rows) == len(actual) == len(expected_values)
    for row, ids, topk_ids, logprobs, tail in zip(
        rows,
        expected_values.tolist(),
        actual.ids,
        actual.logprobs,
        actual.tail_logprobs,
        strict=True,
    ):
        best = sorted(ids, key=lambda token: -row[token])
        assert topk_ids.tolist() == best
        np.testing.assert_allclose(logprobs, [row[token] for token in best], atol=2e-5)
        outside = sum(np.exp(row[token]) for token in row if token not in ids)
        assert np.exp(tail) == pytest.approx(outside, abs=1e-5)


@pytest.mark.parametrize("name", ["sentencepiece", "whole_number"])
async def test_a_teacher_with_another_tokenizer_scores_counterparts_where_spans_begin(
    name: str,
) -> None:
    transport, config = Recorded(service(name).app), teacher_config(**OTHER)
    built = written("12 + 30 = 1999.50, the fox 的", "<|end|>", math=1.0)
    async with scorer_of(IDENTITY, {"math": (transport, config)}) as scorer:
        [example] = await scorer.score([built])
        projection = scorer.projection("math")

    [aligned_score] = example.scores
    sent = transport.sequences[0]["candidate_ids"]
    assert len(sent) == len(aligned_score.score.completion)
    # The dense matrix, row by row: slow and obvious.
    dense = np.zeros((projection.student_width, projection.teacher_size))
    for column in range(projection.teacher_size):
        first, last = projection.column_starts[column : column + 2]
        dense[projection.student_ids[first:last], column] = projection.weights[first:last]
    alignment = align(aligned_score.teacher_input.completion, aligned_score.score.completion)
    starts = dict(zip(alignment.teacher_starts, alignment.student_starts, strict=True))
    assert built.student_topk_ids is not None
    for row, candidates in enumerate(sent):
        if row not in starts:
            assert candidates == []
            continue
        reached = dense[built.student_topk_ids[starts[row]]] > 0
        assert set(candidates) == set(np.flatnonzero(reached.any(axis=0)))
        assert len(candidates) <= TOP_K
        reported = aligned_score.score.topk.ids[row]
        assert set(reported[reported >= 0]) == set(candidates)
    teacher = service(name)
    rows = completion_logprobs(
        teacher.model,
        prompt_ids(name),
        aligned_score.score.completion.token_ids.tolist(),
        teacher.real_ids,
        1.0,
    )
    for row, ids, logprobs in zip(
        rows, aligned_score.score.topk.ids, aligned_score.score.topk.logprobs, strict=True
    ):
        for token, logprob in zip(ids[ids >= 0], logprobs[ids >= 0], strict=True):
            assert logprob == pytest.approx(row[int(token)], abs=2e-5)


def test_counterparts_come_with_the_largest_weight_first() -> None:
    matrix = ProjectionMatrix(
        student_fingerprint="s",
        teacher_fingerprint="t",
        student_width=4,
        teacher_size=3,
        settings=ProjectionSettings(),
        column_starts=np.array([0, 1, 3, 5]),
        student_ids=np.array([0, 0, 2, 0, 3], dtype=np.int32),
        weights=np.array([0.2, 0.5, 1.0, 0.3, 1.0], dtype=np.float32),
        real_ids=np.ones(4, dtype=np.bool_),
    )
    counterparts = Counterparts(matrix)
    assert [counterparts.of(n).tolist() for n in range(4)] == [[1, 2, 0], [], [1], [2]]


async def test_on_the_students_support_a_reverse_divergence_is_nearly_the_whole_one() -> None:
    """Merging ids lowers a divergence; on the student's ids hardly anything is merged."""
    student, teacher = student_of(seed=3, sharpness=60), service("digit")
    settings = RolloutConfig(max_new_tokens=12, temperature=1.0)
    sampler = Sampler(student, settings, seed=0, keep_topk=TOP_K)
    [built] = sampler.sample_batch([Prompt(0, MESSAGES, {"math": 1.0})], step=0, batch=0)
    prompt, ids = built.prompt_token_ids.tolist(), built.completion.token_ids.tolist()
    with torch.no_grad():
        logits = student.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    real = torch.tensor(student.table.real_ids(student.identity.logit_width))
    value = logits.masked_fill(~real, -torch.inf).double().log_softmax(dim=1).numpy()
    other = completion_logprobs(teacher.model, prompt, ids, teacher.real_ids, 1.0)
    whole = [
        sum(np.exp(own[token]) * (own[token] - row[token]) for token in row)
        for own, row in zip(value, other, strict=True)
    ]
    actual: dict[str, torch.Tensor] = {}
    for support in ("student_topk", "teacher_topk"):
        transport, config = Recorded(teacher.app), teacher_config(**{**SAME, "support": support})
        async with scorer_of(student.identity, {"math": (transport, config)}) as scorer:
            [example] = await scorer.score([built])
            projection = ProjectionCache().on(CPU, scorer.projection("math"))
        [aligned_score] = example.scores
        comparison = AlignedPair(
            student=aligned_score.teacher_input.completion,
            sampled_logprobs=built.sampled_logprobs,
            score=aligned_score.score,
            alignment=aligned_score.alignment,
        )
        assert isinstance(config.loss, TopKKlConfig)
        loss = TopKDivergenceLoss(projection, config.loss)
        output = loss(DenseRows(logits, real), loss.targets([comparison], [0]))
        actual[support] = output.per_token
    np.testing.assert_allclose(actual["student_topk"], whole, rtol=0.1)
    assert (actual["teacher_topk"].numpy() < 0.5 * np.array(whole)).all()


async def test_a_teacher_that_scores_no_chosen_ids_is_refused(monkeypatch: Any) -> None:
    plain = service("digit").service
    features = Features(candidate_ids=False, temperature=True, messages=True)
    manifest = plain.manifest.model_copy(update={"features": features})
    monkeypatch.setitem(plain.manifests, None, manifest)
    teachers = {"math": (Recorded(service("digit").app), teacher_config(**SAME))}
    with pytest.raises(ConfigError, match=r"teacher 'math' at .*: unsupported candidate_ids"):
        async with scorer_of(IDENTITY, teachers):
            pass


async def test_a_rollout_without_the_students_ids_is_refused() -> None:
    teachers = {"math": (Recorded(service("digit").app), teacher_config(**SAME))}
    async with scorer_of(IDENTITY, teachers) as scorer:
        with pytest.raises(DataError, match="none in the rollout of prompt 0"):
            await scorer.score([rollout("digit", [70], teachers={"math": 1.0})])


@pytest.mark.parametrize(
    "loss",
    [
        {"type": "ctkd", "span_rows": "pooled"},
        {"type": "gold"},
        {"type": "prefix_kl"},
        {"type": "policy_gradient"},
    ],
)
def test_losses_that_read_other_rows_are_refused(loss: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Value error, support: "):
        TeacherConfig.model_validate({"url": "http://a", "support": "student_topk", "loss": loss})


def test_a_stock_server_is_refused() -> None:
    stock = {"kind": "openai", "tokenizer": "x"}
    with pytest.raises(ValueError, match="Value error, support: "):
        TeacherConfig.model_validate({"url": "http://a", "support": "student_topk", **stock})


def test_reference_answers_have_no_ids_of_the_student(tmp_path: Any) -> None:
    teachers = {"math": {"url": "http://a", **SAME}}
    values = run_values(tmp_path, teachers=teachers)
    assert RunConfig.model_validate(values).teachers["math"].support == "student_topk"
    values["data"] = {**values["data"], "source": "answers", "answer_key": "answer"}
    with pytest.raises(ValueError, match=r"Value error, teachers\.math\.support: "):
        RunConfig.model_validate(values)
