"""A student with another tokenizer: loaded from a folder, translated by the ``Translator``."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mopd_losses.translation.translator import Translator
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Message, TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import ScoringTask
from mopd_server.settings import TranslationSettings
from mopd_server.translation.loading import Student, add_translation
from tests import tiny_models
from tests.server.tiny_teachers import FAMILIES, TinyTeacher, problem, teacher_of
from tests.server.translation.translated_teachers import completions

pytestmark = pytest.mark.anyio

USER = [Message(role="user", content="3 + 4 =")]
TEXT = "the quick brown fox costs 12"
#: So that the teacher is sure enough of some tokens for names.
SHARPNESS = 40.0
K = 6
PAIRS = [("gpt_neox", "digit"), ("llama", "digit")]


def sharp_teacher(family: str) -> TinyTeacher:
    make_model, make_tokenizer = FAMILIES[family]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SHARPNESS)
    return teacher_of(model, tokenizer, warm=False)


def settings_of(tokenizer: str, folder: Path, **options: object) -> TranslationSettings:
    getattr(tiny_models, f"{tokenizer}_tokenizer")().save_pretrained(folder)
    return TranslationSettings(student=str(folder), extra_rounds=0, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("family", "tokenizer"), PAIRS)
async def test_rows_are_those_of_the_translator(
    family: str, tokenizer: str, tmp_path: Path
) -> None:
    teacher = sharp_teacher(family)
    teacher.service.warm = True
    settings = settings_of(tokenizer, tmp_path)
    student = Student.load(settings)
    add_translation(teacher.service, student, settings)
    own, other = student.tokenizer, teacher.tokenizer
    prompt = student.prompts.render(USER)
    ids = [*own.encoder.encode(TEXT), own.table.roles.ending[0]]

    response = await completions(teacher.app, [prompt + ids], k=K)

    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    rows = choice["prompt_logprobs"][len(prompt) :]
    rendered = other.render(USER)
    teacher_prompt = other.tokenizer.encode(rendered, add_special_tokens=False).ids
    tokens = other.table.sequence([*other.encoder.encode(TEXT), other.table.roles.ending[0]])
    task = ScoringTask(np.array(teacher_prompt, dtype=np.int32), tokens.token_ids)
    [scored] = teacher.engine.score([task], top_k=64, temperature=1.0)
    translator = Translator(own.table, own.encoder, other.table, other.encoder)
    score = TeacherScore("", tokens, scored)
    [expected] = translator.begin([own.table.sequence(ids)], [score]).translations()
    assert expected.coverage.has_signal.any()
    for row, (token, actual) in enumerate(zip(ids, rows, strict=True)):
        if not expected.coverage.has_signal[row]:
            assert actual is None
            continue
        for number, (name, entry) in enumerate(entries_of(expected.topk, row, token).items()):
            assert actual.pop(str(name))["logprob"] == pytest.approx(entry, abs=1e-5), number
        assert not actual
    coverage = choice["mopd_coverage"]
    signal = expected.coverage.has_signal
    assert coverage["without_signal"] == (~signal).sum()
    assert coverage["lost_top1"] == expected.coverage.lost_top1[signal].sum()
    assert coverage["prompt_tokens"] == len(prompt)


def entries_of(topk: TopKLogprobs, row: int, token: int) -> dict[int, float]:
    """Return the ids that a response has for a row, with the realised one if that is known."""
    pairs = zip(topk.ids[row, :K].tolist(), topk.logprobs[row, :K].tolist(), strict=True)
    entries = {name: logprob for name, logprob in pairs if name >= 0}
    realised = float(topk.token_logprobs[row])
    return ({} if math.isinf(realised) else {token: realised}) | entries


async def test_registered_prompts_and_the_manifest_of_a_loaded_student(tmp_path: Path) -> None:
    teacher = sharp_teacher("qwen")
    teacher.service.warm = True
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [m.model_dump() for m in USER]}))
    settings = settings_of("whole_number", tmp_path / "student", prompts=prompts)
    student = Student.load(settings)
    add_translation(teacher.service, student, settings)

    assert len(student.prompts) == 1
    ids = student.prompts.render(USER)
    response = await completions(teacher.app, [[*ids, 20, 30]])
    assert response.json()["choices"][0]["mopd_coverage"]["prompt_tokens"] == len(ids)
    problem(await completions(teacher.app, [[20, 30, 40]]), 400, "unknown_prompt")
    facts = teacher.service.manifest.translation
    assert facts is not None
    assert facts.student_fingerprint == student.tokenizer.table.fingerprint
    assert 0 < facts.vocabulary <= 1
    assert facts.texts["English"] <= 1


def test_a_student_without_a_chat_template_is_rejected(tmp_path: Path) -> None:
    tokenizer = tiny_models.digit_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)

    with pytest.raises(ConfigError) as caught:
        Student.load(TranslationSettings(student=str(tmp_path)))
    assert caught.value.key == "student"
    with pytest.raises(ConfigError):
        Student.load(TranslationSettings(student=str(tmp_path / "missing")))
