"""Tests of ``POST /generate`` of the real application with a real engine."""

from typing import Any

import numpy as np
import pytest

from tests.server.compatible.expected_rows import IMPOSSIBLE, expected_rows, send
from tests.server.tiny_teachers import FAMILIES, TinyTeacher, problem

PATH = "/generate"
SAMPLING: dict[str, Any] = {"max_new_tokens": 0}
BODY: dict[str, Any] = {
    "input_ids": [1, 2, 3],
    "sampling_params": SAMPLING,
    "return_logprob": True,
    "logprob_start_len": 0,
}


def generated(teacher: TinyTeacher, **fields: Any) -> Any:
    response = send(teacher.app, PATH, {**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", [0, 2, 5])
def test_entries_equal_the_models_distributions(
    teachers: dict[str, TinyTeacher], family: str, start: int
) -> None:
    """The first token returned has no log-probability; temperature has no effect."""
    teacher = teachers[family]
    width, ends = teacher.service.manifest.logit_width, teacher.tokenizer.table.roles.ending
    prompt = [3, 1, width - 1, *sorted(ends)[:1], 7, 8]
    expected = expected_rows(teacher, prompt)
    sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    meta = generated(
        teacher,
        input_ids=prompt,
        sampling_params=sampling,
        logprob_start_len=start,
        top_logprobs_num=4,
    )["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (6, 0)
    first, *entries = meta["input_token_logprobs"]
    assert first == [None, prompt[start], None]
    rows = expected[start:]
    for token, row, (logprob, token_id, text) in zip(
        prompt[start + 1 :], rows, entries, strict=True
    ):
        assert (token_id, text) == (token, None)
        assert abs(logprob - row[token]) < 1e-5
    if start < 2:
        assert entries[1][0] == IMPOSSIBLE or teacher.tokenizer.table.size == width
    none, *tops = meta["input_top_logprobs"]
    assert none is None
    for row, top in zip(rows, tops, strict=True):
        best = sorted(row.values(), reverse=True)[:4]
        np.testing.assert_allclose([entry[0] for entry in top], best, atol=1e-5)
        np.testing.assert_allclose([row[entry[1]] for entry in top], best, atol=1e-5)


def test_rewards_of_slime(qwen_teacher: TinyTeacher) -> None:
    """slime drops the first entry and keeps as many at the end as the response has tokens."""
    document = generated(qwen_teacher)
    logprobs = [item[0] for item in document["meta_info"]["input_token_logprobs"][1:]]
    assert len(logprobs[-2:]) == 2
    assert all(isinstance(each, float) for each in logprobs)
    assert (document["text"], document["output_ids"]) == ("", [])
    assert "input_top_logprobs" not in document["meta_info"]


def test_several_prompts_and_texts(qwen_teacher: TinyTeacher) -> None:
    both = generated(qwen_teacher, input_ids=[[1, 2, 3], [4]], rid="r")
    assert [each["meta_info"]["id"] for each in both] == ["r-0", "r-1"]
    assert both[1]["meta_info"]["input_token_logprobs"] == [[None, 4, None]]
    single = generated(qwen_teacher)["meta_info"]["input_token_logprobs"]
    assert both[0]["meta_info"]["input_token_logprobs"] == single
    text = generated(qwen_teacher, text="the quick", input_ids=None)
    ids = [entry[1] for entry in text["meta_info"]["input_token_logprobs"]]
    assert qwen_teacher.tokenizer.tokenizer.decode(ids) == "the quick"
    [listed] = generated(qwen_teacher, text=["the quick"], input_ids=None)
    assert listed["meta_info"]["input_token_logprobs"] == text["meta_info"]["input_token_logprobs"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_logprob", False),
        ("return_logprob", None),
        ("logprob_start_len", -1),
        ("logprob_start_len", 3),
        ("logprob_start_len", None),
        ("top_logprobs_num", -1),
        ("top_logprobs_num", 10**6),
        ("token_ids_logprob", [1]),
        ("return_text_in_logprobs", True),
        ("return_hidden_states", True),
        ("stream", True),
        ("image_data", "a"),
        ("input_ids", []),
        ("input_ids", [[1], []]),
        ("input_ids", [448]),
        ("sampling_params", None),
        ("sampling_params", {}),
        *(
            ("sampling_params", {**SAMPLING, name: value})
            for name, value in {
                "max_new_tokens": 2,
                "n": 2,
                "stop": ["a"],
                "top_p": 0.5,
                "top_k": 1,
                "json_schema": "{}",
            }.items()
        ),
    ],
)
def test_other_options_are_rejected_by_name(
    qwen_teacher: TinyTeacher, field: str, value: Any
) -> None:
    response = send(qwen_teacher.app, PATH, {**BODY, field: value})
    assert problem(response, 400, "malformed")["detail"].startswith(field)
    if field == "sampling_params" and value:
        name = next(each for each in reversed(value))
        assert name in problem(response, 400, "malformed")["detail"]


def test_exactly_one_of_ids_and_text_is_required(qwen_teacher: TinyTeacher) -> None:
    for fields in ({"text": "a"}, {"input_ids": None}):
        response = send(qwen_teacher.app, PATH, {**BODY, **fields})
        assert "input_ids or text" in problem(response, 400, "malformed")["detail"]
    unknown = send(qwen_teacher.app, PATH, {**BODY, "lora_path": "other"})
    problem(unknown, 404, "not_found")
