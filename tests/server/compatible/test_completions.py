"""Tests of ``POST /v1/completions`` of the real application with a real engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_server.app import create_app
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.middleware import response_limit
from mopd_server.http.middleware.quotas import KeyQuota
from tests.server.compatible.expected_rows import expected_rows, require_rows, send
from tests.server.tiny_teachers import FAMILIES, TinyTeacher, get, problem, request_async

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 1, "prompt_logprobs": 2}


def choices(teacher: TinyTeacher, **fields: Any) -> list[dict[str, Any]]:
    response = send(teacher.app, PATH, {**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_rows_equal_the_models_distributions_at_every_position(
    teachers: dict[str, TinyTeacher], family: str, data: st.DataObject
) -> None:
    """Ids of the padded head and ending tokens are input and scored like others."""
    teacher = teachers[family]
    width, ends = teacher.service.manifest.logit_width, teacher.tokenizer.table.roles.ending
    ids = st.one_of(st.integers(0, width - 1), st.sampled_from([width - 1, *ends]))
    prompts = data.draw(st.lists(st.lists(ids, min_size=1, max_size=12), min_size=1, max_size=4))
    top_k = data.draw(st.sampled_from([1, 3, 64]))
    temperature = data.draw(st.sampled_from([None, 0, 1.0, 0.5]))
    scored = choices(teacher, prompt=prompts, prompt_logprobs=top_k, temperature=temperature)
    assert [choice["index"] for choice in scored] == [*range(len(prompts))]
    for prompt, choice in zip(prompts, scored, strict=True):
        expected = expected_rows(teacher, prompt, temperature or 1.0)
        require_rows(choice["prompt_logprobs"], prompt, expected, top_k)


def test_response_has_the_form_of_an_openai_completion(qwen_teacher: TinyTeacher) -> None:
    body = {**BODY, "prompt": [[1, 2], [3]], "model": "math", "max_tokens": 0}
    response = send(qwen_teacher.app, PATH, {**body, "return_token_ids": True})
    document = response.json()
    assert response.headers["content-type"] == "application/json"
    assert document["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert (document["object"], document["model"]) == ("text_completion", "math")
    usage = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert document["usage"] == usage
    for choice, ids in zip(document["choices"], ([1, 2], [3]), strict=True):
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert (choice["logprobs"], choice["prompt_token_ids"]) == (None, ids)
    assert document["choices"][1]["prompt_logprobs"] == [None]
    cards = get(qwen_teacher.app, "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["math"]


def test_texts_are_tokenized_as_prompts(qwen_teacher: TinyTeacher) -> None:
    texts = ["the quick", "fox 12"]
    first, second = choices(qwen_teacher, prompt=texts, return_token_ids=True)
    ids = [first["prompt_token_ids"], second["prompt_token_ids"]]
    assert [*map(qwen_teacher.tokenizer.tokenizer.decode, ids)] == texts
    single = choices(qwen_teacher, prompt=texts[0])
    by_ids = choices(qwen_teacher, prompt=ids[0])
    assert single[0]["prompt_logprobs"] == by_ids[0]["prompt_logprobs"]
    assert by_ids[0]["prompt_logprobs"] == first["prompt_logprobs"]


#: What TRL 1.16 sends, and defaults that the openai client or vLLM's users send explicitly.
ACCEPTED = [
    {"model": "math", "temperature": 1.0},
    {"seed": 1, "user": "a", "ignore_eos": True, "skip_special_tokens": False, "top_p": 1.0},
    {"n": 1, "best_of": 1, "echo": False, "stream": False, "logprobs": None, "stop": None},
    {"stop": [], "logit_bias": {}, "suffix": None, "top_k": -1, "min_p": 0.0, "min_tokens": 0},
    {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0},
    {"add_special_tokens": True, "max_tokens": 0, "temperature": 0},
]

REJECTED: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (2, -1, None)),
    *(("prompt_logprobs", value) for value in (0, -1, None, "all")),
    *(("n", value) for value in (0, 2)),
    *(("temperature", value) for value in (-1, 101, 0.001)),
    ("best_of", 2),
    ("echo", True),
    ("stream", True),
    ("stream_options", {}),
    ("logprobs", 1),
    ("stop", ["a"]),
    ("stop_token_ids", [1]),
    ("bad_words", ["a"]),
    ("logit_bias", {"1": 1}),
    ("allowed_token_ids", [1]),
    ("suffix", "a"),
    ("top_p", 0.9),
    ("top_k", 5),
    ("min_p", 0.1),
    ("min_tokens", 1),
    ("frequency_penalty", 0.5),
    ("presence_penalty", -0.5),
    ("repetition_penalty", 1.1),
    ("length_penalty", 2),
    ("use_beam_search", True),
    ("truncate_prompt_tokens", 1),
    ("add_special_tokens", False),
    ("priority", 1),
    ("response_format", {"type": "text"}),
    ("structured_outputs", {}),
    ("prompt", 3),
    ("prompt", [1, "a"]),
    ("prompt", [-1]),
    ("prompt", [[1], 2]),
    ("prompt", []),
    ("prompt", None),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_options_without_an_effect_are_accepted(
    qwen_teacher: TinyTeacher, fields: dict[str, Any]
) -> None:
    assert choices(qwen_teacher, **fields)[0]["text"] == ""


@pytest.mark.parametrize(("field", "value"), REJECTED)
def test_other_options_are_rejected_by_name(
    qwen_teacher: TinyTeacher, field: str, value: Any
) -> None:
    response = send(qwen_teacher.app, PATH, {**BODY, field: value})
    assert problem(response, 400, "malformed")["detail"].startswith(f"{field}: ")


def test_missing_and_unknown_fields_are_rejected_by_name(qwen_teacher: TinyTeacher) -> None:
    for field in BODY:
        body = {name: value for name, value in BODY.items() if name != field}
        [error] = problem(send(qwen_teacher.app, PATH, body), 400, "malformed")["errors"]
        assert error["field"] == field
    response = send(qwen_teacher.app, PATH, {**BODY, "prompt_embeds": ""})
    assert "'prompt_embeds'" in problem(response, 400, "malformed")["detail"]


def test_limits_are_those_of_the_manifest(qwen_teacher: TinyTeacher) -> None:
    manifest = qwen_teacher.service.manifest
    width, longest, top_k = manifest.logit_width, manifest.max_model_len, manifest.max_top_k
    for field, highest, status in (
        ("prompt", [width - 1], 400),
        ("prompt", [1] * longest, 413),
        ("prompt_logprobs", top_k, 400),
    ):
        above = highest + 1 if isinstance(highest, int) else [*highest, highest[0]]
        above = [width] if highest == [width - 1] else above
        choices(qwen_teacher, **{field: highest})
        rejected = send(qwen_teacher.app, PATH, {**BODY, field: above})
        code = "too_large" if status == 413 else "malformed"
        assert problem(rejected, status, code)["detail"].startswith(f"{field}: ")
    for prompts in ([[1], []], [[1], [width]], [[1], [2**70]]):
        rejected = send(qwen_teacher.app, PATH, {**BODY, "prompt": prompts})
        assert problem(rejected, 400, "malformed")["detail"].startswith("prompt[1]: ")
    unknown = send(qwen_teacher.app, PATH, {**BODY, "model": "other"})
    assert "math" in problem(unknown, 404, "not_found")["detail"]


def test_entries_include_the_realised_token(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_limit, "MAX_JSON_ENTRIES", 6)
    choices(qwen_teacher)
    rejected = send(qwen_teacher.app, PATH, {**BODY, "prompt_logprobs": 3})
    assert "found 8 entries" in problem(rejected, 413, "too_large")["detail"]


def test_keys_and_quotas_are_those_of_scoring(qwen_teacher: TinyTeacher) -> None:
    quota = KeyQuota(tokens_per_minute=4)
    for path, body in (
        (PATH, BODY),
        (
            "/generate",
            {
                "input_ids": [1, 2, 3],
                "return_logprob": True,
                "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 0},
            },
        ),
    ):
        app = create_app(qwen_teacher.service, api_keys=["alice sesame"], quota=quota)
        problem(send(app, path, body), 401, "unauthorized")
        key = {"Authorization": "Bearer sesame"}
        for rejected in ({**body, "extra": 1}, {**body, "prompt": [10**6]}):
            assert send(app, path, rejected, **key).status_code == 400
        assert send(app, path, body, **key).status_code == 200
        problem(send(app, path, body, **key), 429, "quota_tokens")
        metrics = get(app, "/metrics").text
        assert f'mopd_requests_total{{path="{path}",status="200"}} 1.0' in metrics
        assert 'mopd_key_tokens_total{key="alice",kind="completion"} 2.0' in metrics


def test_drain_rejects_requests_and_waits_for_the_response(qwen_teacher: TinyTeacher) -> None:
    lifecycle = Lifecycle(qwen_teacher.service)
    app = create_app(lifecycle)
    idle: list[int] = []

    async def scenario() -> tuple[httpx.Response, httpx.Response]:
        accepted = asyncio.create_task(request_async(app, "POST", PATH, BODY))
        while not lifecycle.in_flight:
            await asyncio.sleep(0)
        lifecycle.drain(lambda: idle.append(lifecycle.in_flight))
        assert idle == []
        return await request_async(app, "POST", PATH, BODY), await accepted

    rejected, accepted = asyncio.run(scenario())
    problem(rejected, 503, "draining")
    assert int(rejected.headers["retry-after"]) > 0
    assert accepted.status_code == 200
    assert idle == [0]
    loading = create_app(Lifecycle())
    for response in (send(loading, PATH, BODY), get(loading, "/health")):
        problem(response, 503, "loading")
    assert get(app, "/health").status_code == 200


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("[[%s], [447, %s]]", None),
        ("[%s]", None),
        (" [ [ %s ] , [ 1 ] ] ", None),
        ("[[%s], [-1]]", "prompt[1][0]"),
        ("[[%s, -1]]", "prompt[0][40001]"),
        ("[%s, -1]", "prompt[40001]"),
        ("[[%s], 3]", "prompt"),
        ("[[%s,]]", "prompt[0]"),
        ("[[%s], [[1]]]", "prompt"),
        ('[["%s"]]', "prompt"),
    ],
)
def test_large_bodies_are_parsed_as_small_ones(
    qwen_teacher: TinyTeacher, prompt: str, field: str | None
) -> None:
    """More than 64 KiB are parsed in parts; the sequence is then too long, or invalid."""
    many = ", ".join(["7"] * 40001)
    text = prompt.replace("%s", many)
    body = f'{{"prompt": {text}, "max_tokens": 1, "prompt_logprobs": 2, "user": "prompt"}}'
    response = send(qwen_teacher.app, PATH, body)
    if field is None:
        assert "found 40001 tokens" in problem(response, 413, "too_large")["detail"]
    else:
        assert problem(response, 400, "malformed")["detail"].startswith(field)


def test_many_prompts_equal_single_ones(qwen_teacher: TinyTeacher) -> None:
    prompts = [[index % 400, 5, 6, 107] for index in range(4000)]
    body = json.dumps({**BODY, "prompt": prompts, "prompt_logprobs": 1})
    assert len(body) > 64 * 1024
    response = send(qwen_teacher.app, PATH, body)
    assert response.status_code == 200, response.text
    scored = response.json()["choices"]
    assert len(scored) == len(prompts)
    assert scored[399]["prompt_logprobs"] == scored[3999]["prompt_logprobs"]
    too_many = json.dumps({**BODY, "prompt": [[1]] * 4097})
    problem(send(qwen_teacher.app, PATH, too_many), 400, "malformed")
