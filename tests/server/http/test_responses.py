"""The real application with a real engine: what it answers."""

import asyncio

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mopd_protocol.codec import BINARY_MEDIA_TYPE, decode_binary, decode_json
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_server.app import create_app
from tests.reference.teacher_scores import completion_logprobs
from tests.server.tiny_teachers import (
    FAMILIES,
    TinyTeacher,
    get,
    post,
    request_async,
    scores_of,
    teacher_of_family,
)

QUESTION = {
    "messages": [{"role": "user", "content": "3 + 4 ="}],
    "completion": "it is 7",
    "finished": True,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_the_teachers_distribution_of_every_token_and_of_stopping(
    teachers: dict[str, TinyTeacher], family: str
) -> None:
    teacher = teachers[family]
    (scored,) = scores_of(teacher.app, QUESTION, top_k=5, temperature=0.5)
    table, tokens = teacher.tokenizer.table, scored["token_ids"]
    assert b"".join(map(table.bytes_of, tokens)) == b"it is 7"
    assert tokens[-1] == table.roles.end_of_turn
    assert scored["marks"] == [[len(tokens) - 1, "end_of_turn"]]
    prompt = teacher.tokenizer.tokenize(
        LogprobsRequest.model_validate({"sequences": [QUESTION]}).sequences[0]
    ).prompt_ids.tolist()
    expected = completion_logprobs(teacher.model, prompt, tokens, teacher.real_ids, 0.5)
    for row, distribution in enumerate(expected):
        ids = sorted(distribution, key=distribution.__getitem__, reverse=True)[:5]
        assert scored["topk_ids"][row] == ids
        np.testing.assert_allclose(
            scored["topk_logprobs"][row], [distribution[i] for i in ids], atol=2e-5
        )
        np.testing.assert_allclose(
            scored["token_logprobs"][row], distribution[tokens[row]], atol=2e-5
        )


def test_both_spellings_of_an_answer_are_one_response(qwen_teacher: TinyTeacher) -> None:
    body = {
        "sequences": [
            {**QUESTION, "id": "a"},
            {"prompt": "the quick", "completion": ["12", {"control": "<|user|>"}, " 🙂"]},
            {"prompt_token_ids": [9], "completion_token_ids": [7, 130], "candidate_ids": [[1], []]},
            {"prompt": "the quick", "completion": ""},
        ],
        "top_k": 3,
    }
    as_json = post(qwen_teacher.app, body)
    as_bytes = post(qwen_teacher.app, body, {"Accept": BINARY_MEDIA_TYPE})
    assert as_json.headers["content-type"] == "application/json"
    assert as_bytes.headers["content-type"] == BINARY_MEDIA_TYPE
    people, programs = decode_json(as_json.json()), decode_binary(as_bytes.content)
    assert people.ids == programs.ids == ("a", None, None, None)
    assert people.manifest_id == programs.manifest_id
    assert people.timings.keys() == programs.timings.keys() == {"tokenize", "queue", "prefill"}
    for left, right in zip(people.scores, programs.scores, strict=True):
        assert left.completion.token_ids.tolist() == right.completion.token_ids.tolist()
        assert left.completion.byte_ends.tolist() == right.completion.byte_ends.tolist()
        assert left.completion.text == right.completion.text
        assert left.completion.marks == right.completion.marks
        k = left.topk.k
        assert left.topk.ids.tolist() == right.topk.ids[:, :k].tolist()
        assert (right.topk.ids[:, k:] == -1).all()
        assert left.topk.logprobs.tolist() == right.topk.logprobs[:, :k].tolist()
        assert left.topk.token_logprobs.tolist() == right.topk.token_logprobs.tolist()
        assert left.topk.tail_logprobs.tolist() == right.topk.tail_logprobs.tolist()


def test_float16_halves_the_binary_and_keeps_three_digits(qwen_teacher: TinyTeacher) -> None:
    sequence = {"prompt": "a", "completion_token_ids": list(range(100, 150))}
    accept = {"Accept": BINARY_MEDIA_TYPE}
    wide = post(qwen_teacher.app, {"sequences": [sequence], "top_k": 100}, accept).content
    body = {"sequences": [sequence], "top_k": 100, "logprobs_dtype": "float16"}
    narrow = post(qwen_teacher.app, body, accept).content
    # The header's timings are a few digits longer or shorter.
    assert abs(len(wide) - len(narrow) - 50 * 100 * 2) < 100
    np.testing.assert_allclose(
        decode_binary(narrow).scores[0].topk.logprobs,
        decode_binary(wide).scores[0].topk.logprobs,
        rtol=1e-3,
    )


def test_an_empty_completion_is_answered_with_no_rows(qwen_teacher: TinyTeacher) -> None:
    (scored,) = scores_of(qwen_teacher.app, {"prompt": "a", "completion": ""})
    assert scored["token_ids"] == scored["topk_ids"] == scored["token_logprobs"] == []


def test_candidates_are_what_is_answered_for(qwen_teacher: TinyTeacher) -> None:
    sequence = {"prompt": "a", "completion": "7", "finished": True, "candidate_ids": [[5, 9], [0]]}
    (scored,) = scores_of(qwen_teacher.app, sequence)
    assert sorted(scored["topk_ids"][0]) == [5, 9]
    assert scored["topk_ids"][1] == [0, -1]
    assert scored["topk_logprobs"][1][1] is None
    assert scored["topk_logprobs"][1][0] == scored["token_logprobs"][1]


def test_concurrent_requests_are_answered_as_they_are_alone(qwen_teacher: TinyTeacher) -> None:
    app = qwen_teacher.app
    bodies = [
        {"sequences": [{"prompt": "the", "completion": f" fox {n} " * n}], "top_k": 1 + n % 3}
        for n in range(8)
    ]

    async def together() -> list[httpx.Response]:
        posts = (request_async(app, "POST", "/v1/logprobs", body) for body in bodies)
        return await asyncio.gather(*posts)

    for body, answer in zip(bodies, asyncio.run(together()), strict=True):
        alone = decode_json(post(app, body).json()).scores[0]
        among = decode_json(answer.json()).scores[0]
        assert among.topk.ids.tolist() == alone.topk.ids.tolist()
        np.testing.assert_allclose(among.topk.logprobs, alone.topk.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_served_tokenizer_is_the_one_in_the_manifest(
    teachers: dict[str, TinyTeacher], family: str, tmp_path
) -> None:
    app = teachers[family].app
    manifest = Manifest.parse(get(app, "/v1/manifest").json())
    files = get(app, "/v1/tokenizer").json()["files"]
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    table = TokenTable.from_tokenizer(tokenizer, manifest.roles)
    assert table.fingerprint == manifest.tokenizer_fingerprint
    assert table.size == manifest.tokenizer_size
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert TokenTable.from_tokenizer(loaded.backend_tokenizer).fingerprint == table.fingerprint
    messages = QUESTION["messages"]
    assert "3 + 4 =" in loaded.apply_chat_template(messages, tokenize=False)


def test_the_manifest_says_who_answers(qwen_teacher: TinyTeacher) -> None:
    body = get(qwen_teacher.app, "/v1/manifest").json()
    manifest = Manifest.parse(body)
    assert body["manifest_id"] == manifest.manifest_id == qwen_teacher.service.manifest.manifest_id
    assert (manifest.service, manifest.logit_width, manifest.tokenizer_size) == ("math", 448, 420)
    assert (manifest.max_model_len, manifest.max_top_k) == (256, 420)
    assert manifest.features.model_dump() == {
        "candidate_ids": True,
        "temperature": True,
        "messages": True,
    }
    limited = teacher_of_family("qwen", top_k_max=5).service.manifest
    assert limited.max_top_k == 5
    assert limited.manifest_id == manifest.manifest_id  # a limit changes no score


def test_the_documentation_shows_a_request_that_works(qwen_teacher: TinyTeacher) -> None:
    assert get(qwen_teacher.app, "/docs").status_code == 200
    schema = get(qwen_teacher.app, "/openapi.json").json()
    (example,) = schema["components"]["schemas"]["LogprobsRequest"]["examples"]
    assert post(qwen_teacher.app, example).status_code == 200
    answers = schema["paths"]["/v1/logprobs"]["post"]["responses"]
    assert {"200", "400", "401", "408", "413", "422", "429", "500", "503", "504"} == answers.keys()


def test_metrics_count_requests_tokens_and_phases() -> None:
    teacher = teacher_of_family("qwen")
    app = create_app(teacher.service)
    scores_of(app, {"prompt_token_ids": [4, 5, 6], "completion_token_ids": [7, 8]}, top_k=1)
    assert post(app, {"sequences": []}).status_code == 400
    assert get(app, "/wp-login.php").status_code == 404
    lines = get(app, "/metrics").text.splitlines()
    assert 'mopd_requests_total{path="/v1/logprobs",status="200"} 1.0' in lines
    assert 'mopd_requests_total{path="/v1/logprobs",status="400"} 1.0' in lines
    assert 'mopd_requests_total{path="other",status="404"} 1.0' in lines
    assert "mopd_tokens_scored_total 2.0" in lines
    assert "mopd_prompt_tokens_total 3.0" in lines
    assert "mopd_queue_sequences 0.0" in lines
    for phase in ("tokenize", "queue", "prefill", "encode"):
        assert f'mopd_phase_seconds_count{{phase="{phase}"}} 1.0' in lines
