"""Every check of the doctor, on a sound run and with the fault that it is made for."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mopd_client.pool import TeacherPool
from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import TeacherClient
from mopd_losses.build import build_loss
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.translation.fitness import fitness
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Message, Prompt, TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.config.loading import parse_run
from mopd_trainer.config.student import StudentConfig
from mopd_trainer.diagnostics import self_distillation
from mopd_trainer.diagnostics.case import Case, loss_of, open_case
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.diagnostics.identity import check_identity
from mopd_trainer.diagnostics.learnability import check_learnability
from mopd_trainer.diagnostics.own_text import check_own_text
from mopd_trainer.diagnostics.resources import check_resources
from mopd_trainer.diagnostics.self_distillation import check_gradient
from mopd_trainer.diagnostics.teachers import check_agreement, check_coverage, check_row_shift
from mopd_trainer.diagnostics.templates import check_templates, check_tokenizer
from mopd_trainer.diagnostics.translation import check_translation
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.connect import connect_teachers
from tests import tiny_models
from tests.broker import Broker
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded
from tests.trainer.runs import run_values, write_lines
from tests.trainer.students import CPU, encoder, model_of, table, tokenizer

pytestmark = pytest.mark.anyio

PROMPTS = [
    Prompt(index=n, messages=(Message(role="user", content=f"{n} + 4 ="),), teachers={"math": 1.0})
    for n in range(5)
]


class Faulty(TeacherClient):
    """A client whose scores have a fault."""

    def __init__(self, fault: str, transport: Recorded) -> None:
        super().__init__("math", ["http://teacher"], transport=transport)
        self._fault = fault
        self._calls = 0

    async def score(
        self, sequences: Sequence[SequenceRequest], **options: Any
    ) -> list[TeacherScore]:
        """Return the scores with the fault."""
        scores = await super().score(sequences, **options)
        self._calls += 1
        noise = 0.01 * self._calls if self._fault == "noise" else 0.0
        by = 1 if self._fault == "shift" else 0
        return [_changed(score, noise, by, self._fault == "tail") for score in scores]


def _changed(score: TeacherScore, noise: float, by: int, tail: bool) -> TeacherScore:
    topk = score.topk
    return replace(
        score,
        topk=TopKLogprobs(
            ids=np.roll(topk.ids, by, axis=0),
            logprobs=np.roll(topk.logprobs, by, axis=0) - (3.0 if tail else 0.0),
            token_logprobs=np.roll(topk.token_logprobs, by) - noise,
            tail_logprobs=np.full(len(topk), np.log(0.95))
            if tail
            else np.roll(topk.tail_logprobs, by),
        ),
    )


@asynccontextmanager
async def case_of(tmp_path: Path, fault: str = "", **settings: Any) -> AsyncIterator[Case]:
    """A student whose teacher is a slightly different separate model."""
    values = run_values(tmp_path, **settings)
    values["teachers"] = {"math": {"url": "http://teacher", "top_k": 400}}
    values["teachers"]["math"]["loss"] = {"type": "topk_kl"}
    config = parse_run(values, source="run")
    student = Student(model_of("qwen", sharpness=6.0), tokenizer("digit"), CPU)
    other = model_of("qwen", sharpness=6.0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.03)
    transport = Recorded(teacher_of(other, tokenizer("digit")).app)
    client = Faulty(fault, transport)
    async with TeacherPool({"math": client}) as pool:
        cache = ProjectionCache()
        teachers = await connect_teachers(
            pool, config.teachers, student.identity, cache, {}, wait_seconds=60.0
        )
        sides = student.identity, teachers["math"].tokenizer
        loss = build_loss(config.teachers["math"].loss, *sides, CPU, cache=cache)
        yield await open_case(config, PROMPTS, student, pool, teachers, {"math": loss})


def statuses(findings: Sequence[Finding]) -> list[str]:
    assert all(finding.text and len(finding.line()) > 40 for finding in findings)
    return [finding.status for finding in findings]


@pytest.mark.parametrize(("fault", "expected"), [("", "ok"), ("noise", "failed")])
async def test_agreement(tmp_path: Path, fault: str, expected: str) -> None:
    async with case_of(tmp_path, fault) as case:
        (finding,) = [each async for each in check_agreement(case)]
    assert finding.status == expected
    assert (finding.numbers["nats"] > 1e-3) == (expected == "failed")


@pytest.mark.parametrize(("fault", "expected"), [("", "ok"), ("shift", "failed")])
async def test_row_shift(tmp_path: Path, fault: str, expected: str) -> None:
    async with case_of(tmp_path, fault) as case:
        assert statuses(list(check_row_shift(case))) == [expected]


@pytest.mark.parametrize(("fault", "expected"), [("", "ok"), ("tail", "warning")])
async def test_coverage(tmp_path: Path, fault: str, expected: str) -> None:
    async with case_of(tmp_path, fault) as case:
        assert statuses(list(check_coverage(case))) == [expected]
        nothing = replace(case, examples=())
        assert statuses(list(check_coverage(nothing))) == ["failed"]


@pytest.mark.parametrize("other", ["digit", "whole_number", "sentencepiece"])
async def test_translation(tmp_path: Path, other: str) -> None:
    async with case_of(tmp_path) as case:
        student = replace(case.student.identity, table=table(other), logit_width=table(other).size)
        findings = list(check_translation(student, case.teachers))
    assert statuses(findings) == ([] if other == "digit" else ["ok"])
    for finding in findings:
        expected = fitness(table(other), encoder("digit"))
        assert finding.numbers == {"vocabulary": expected.vocabulary, **expected.texts}
        assert expected.verdict in finding.text


async def test_losses_are_measured_as_in_training(tmp_path: Path) -> None:
    async with case_of(tmp_path) as case:
        options = case.losses["math"], case.examples_of("math"), case.config
        without = loss_of(case.student, "math", *options)[1]
        for module in case.student.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        case.student.model.eval()
        _, first = loss_of(case.student, "math", *options)
        assert first != pytest.approx(without, rel=1e-3)
        assert loss_of(case.student, "math", *options)[1] == first


class Certain(Faulty):
    """A client of a teacher that is certain of given tokens after every prompt."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__("", Recorded(teacher_of(model_of("qwen"), tokenizer("digit")).app))
        self._token_ids = np.array(token_ids, dtype=np.int32)

    async def score(
        self, sequences: Sequence[SequenceRequest], **options: Any
    ) -> list[TeacherScore]:
        """Return rows with these tokens at the top, and the first of them with probability 1."""
        return [self._certain(score) for score in await super().score(sequences, **options)]

    def _certain(self, score: TeacherScore) -> TeacherScore:
        own = self._token_ids[: len(score.topk)]
        ids, logprobs = score.topk.ids.copy(), score.topk.token_logprobs.copy()
        ids[: len(own), 0] = own
        logprobs[: len(own)][np.cumprod(score.token_ids[: len(own)] == own) > 0] = 0.0
        return replace(score, topk=replace(score.topk, ids=ids, token_logprobs=logprobs))


@pytest.mark.parametrize("divided", [False, True])
async def test_own_text(tmp_path: Path, *, divided: bool) -> None:
    """The fault is a teacher that writes a word with one token for every byte."""
    word = b"plus plus"
    tokens = encoder("digit").encode(word.decode())
    characters = [table("digit").all_bytes.index(bytes([each])) for each in word]
    assert tokens != characters
    written = [*(characters if divided else tokens), *table("digit").roles.ending]
    async with case_of(tmp_path) as case, TeacherPool({"math": Certain(written)}) as pool:
        await pool.handshake_all({"math": Expectation(top_k=1, temperature=1.0)})
        assert [each async for each in check_own_text(case)] == []  # its loss sends ids
        teacher = case.teachers["math"]
        manifest = teacher.manifest.model_copy(update={"tokenizer_fingerprint": "other"})
        case = replace(case, teachers={"math": replace(teacher, manifest=manifest)}, pool=pool)
        (finding,) = [each async for each in check_own_text(case)]
    assert statuses([finding]) == ["warning" if divided else "ok"]
    assert finding.numbers["changed"] == (4 if divided else 0)
    assert (finding.numbers["nats"] > 1.0) == divided


async def test_gradient(tmp_path: Path) -> None:
    async with case_of(tmp_path) as case:
        before = {key: p.detach().clone() for key, p in case.student.trained().items()}
        (finding,) = check_gradient(case)
        assert finding.status == "ok"
        assert finding.numbers["after"] < finding.numbers["before"]
        for key, parameter in case.student.trained().items():
            assert torch.equal(parameter, before[key])
        with pytest.MonkeyPatch.context() as patch:  # uphill
            gradient = self_distillation._gradient
            patch.setattr(
                self_distillation,
                "_gradient",
                lambda *inputs: {key: -value for key, value in gradient(*inputs).items()},
            )
            assert statuses(list(check_gradient(case))) == ["failed"]


async def test_identity(tmp_path: Path) -> None:
    async with case_of(tmp_path) as case:
        teacher = case.teachers["math"]
    assert statuses(list(check_identity({"math": teacher}))) == ["ok"]
    assert statuses(list(check_identity({"a": teacher, "b": teacher}))) == ["warning"] * 2
    other = replace(teacher, manifest=teacher.manifest.model_copy(update={"dtype": "x"}))
    assert statuses(list(check_identity({"math": other, "code": teacher}))) == ["ok", "failed"]
    assert statuses(list(check_identity({"history": teacher}))) == ["warning"]


@pytest.mark.parametrize(("grader", "expected"), [("half", "ok"), ("none", "failed")])
async def test_learnability(tmp_path: Path, grader: str, expected: str) -> None:
    path = str(write_lines(tmp_path / "held-out.jsonl", [{"prompt": "3 + 4 ="}] * 4))
    sets = {"x": {"prompts": path, "grader": f"python:{__name__}:{grader}"}}
    async with case_of(tmp_path, evaluation={"every": 1, "sets": sets}) as case:
        assert statuses([each async for each in check_learnability(case)]) == [expected]
        config = case.config.model_copy(update={"evaluation": None})
        unmeasured = replace(case, config=config)
        assert statuses([each async for each in check_learnability(unmeasured)]) == ["warning"]


def none(prompt: Prompt, completion: str) -> float:
    """Grade every completion as wrong."""
    return 0.0


def half(prompt: Prompt, completion: str) -> float:
    """Grade half of the completions as correct."""
    return float(len(completion) % 2)


def test_templates_and_tokenizer(tmp_path: Path) -> None:
    student = Student(model_of("qwen"), tokenizer("digit"), CPU)
    student.save(tmp_path)
    config = StudentConfig(model=str(tmp_path), device="cpu")
    assert statuses(list(check_templates(PROMPTS, student.identity))) == ["ok"]
    assert statuses(list(check_tokenizer(PROMPTS, config, student.identity))) == ["ok"]
    tiny_models.sentencepiece_tokenizer().save_pretrained(tmp_path)
    assert statuses(list(check_tokenizer(PROMPTS, config, student.identity))) == ["warning"]
    changed: Any = tiny_models.digit_tokenizer()
    changed.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    identity = replace(student.identity, tokenizer=changed)
    assert statuses(list(check_templates(PROMPTS, identity))) == ["failed"]


def test_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = Student(model_of("qwen"), tokenizer("digit"), CPU).identity
    config = parse_run(run_values(tmp_path), source="run")
    assert statuses(list(check_resources(config, identity))) == ["ok"]
    for strategy in ("ddp", "fsdp"):
        student = {**run_values(tmp_path)["student"], "sharding": strategy}
        sharded = parse_run(run_values(tmp_path, student=student), source="run")
        on_ray = parse_run(
            run_values(tmp_path, student=student, resources={"student": 2}), source="run"
        )
        assert statuses(list(check_resources(sharded, identity))) == ["warning", "ok"]
        assert statuses(list(check_resources(on_ray, identity))) == ["ok"]
        with monkeypatch.context() as patched:
            patched.setenv("WORLD_SIZE", "2")
            assert statuses(list(check_resources(sharded, identity))) == ["ok"]
    huge = replace(identity, parameters=10**15, trained=10**15)
    assert statuses(list(check_resources(config, huge))) == ["failed"]
    (tmp_path / "file").touch()
    values = run_values(tmp_path, output_dir=str(tmp_path / "file" / "run"))
    blocked = parse_run(values, source="run")
    assert statuses(list(check_resources(blocked, identity))) == ["failed"]


@pytest.mark.slow
async def test_self_distillation(tmp_path: Path, broker: Broker) -> None:
    """Through HTTP; the fault is a service of another model."""
    folders = {
        name: tiny_models.save(
            model_of("qwen", seed, sharpness=6.0), tokenizer("digit"), tmp_path / name
        )
        for seed, name in enumerate(("same", "other"))
    }
    urls = broker.serve(folders)
    async with case_of(tmp_path) as case:
        for name, expected in (("same", "ok"), ("other", "failed")):
            (finding,) = await self_distillation.self_distillation(case, urls[name])
            assert finding.status == expected
            assert (finding.numbers["norm"] < 1e-3) == (expected == "ok")
