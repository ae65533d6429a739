"""Tests of responses of the real application with a real engine."""

import asyncio

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mopd_protocol.codec import BINARY_MEDIA_TYPE, decode_binary, decode_json
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.requests import REQUEST_HEADER, LogprobsRequest, SequenceRequest, body_hash
from mopd_protocol.tokenizers.token_table import TokenTable
from tests.reference.teacher_scores import completion_logprobs
from tests.server.tiny_teachers import (
    FAMILIES,
    TinyTeacher,
    get,
    post,
    post_async,
    scores_of,
    teacher_of_family,
)

SEQUENCE = {
    "messages": [{"role": "user", "content": "3 + 4 ="}],
    "completion": "it is 7",
    "finished": True,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_response_equals_the_reference_for_every_token_and_the_end_of_turn(
    teachers: dict[str, TinyTeacher], family: str
) -> None:
    teacher = teachers[family]
    (scored,) = scores_of(teacher.app, SEQUENCE, top_k=5, temperature=0.5)
    table, tokens = teacher.tokenizer.table, scored["token_ids"]
    assert b"".join(map(table.bytes_of, tokens)) == b"it is 7"
    assert tokens[-1] == table.roles.end_of_turn
    assert scored["marks"] == [[len(tokens) - 1, "end_of_turn"]]
    prompt = teacher.tokenizer.tokenize(
        LogprobsRequest.model_validate({"sequences": [SEQUENCE]}).sequences[0]
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


def test_json_and_binary_responses_are_equal(qwen_teacher: TinyTeacher) -> None:
    body = {
        "sequences": [
            {**SEQUENCE, "id": "a"},
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
    assert as_json.headers[REQUEST_HEADER] == body_hash(as_json.request.content)
    left, right = decode_json(as_json.json()), decode_binary(as_bytes.content)
    assert left.ids == right.ids == ("a", None, None, None)
    assert left.manifest_id == right.manifest_id
    assert left.timings.keys() == right.timings.keys() == {"tokenize", "queue", "prefill"}
    for first, second in zip(left.scores, right.scores, strict=True):
        for name in ("token_ids", "byte_ends"):
            arrays = (getattr(score.completion, name).tolist() for score in (first, second))
            assert next(arrays) == next(arrays)
        assert first.completion.text == second.completion.text
        assert first.completion.marks == second.completion.marks
        k = first.topk.k
        assert first.topk.ids.tolist() == second.topk.ids[:, :k].tolist()
        assert (second.topk.ids[:, k:] == -1).all()
        assert first.topk.logprobs.tolist() == second.topk.logprobs[:, :k].tolist()
        for name in ("token_logprobs", "tail_logprobs"):
            np.testing.assert_array_equal(getattr(first.topk, name), getattr(second.topk, name))


def test_float16_halves_the_response_and_keeps_three_digits(
    qwen_teacher: TinyTeacher,
) -> None:
    sequence = {"prompt": "a", "completion_token_ids": list(range(100, 150))}
    accept = {"Accept": BINARY_MEDIA_TYPE}
    wide = post(qwen_teacher.app, {"sequences": [sequence], "top_k": 100}, accept).content
    body = {"sequences": [sequence], "top_k": 100, "logprobs_dtype": "float16"}
    narrow = post(qwen_teacher.app, body, accept).content
    # The length of the timings in the header varies.
    assert abs(len(wide) - len(narrow) - 50 * 100 * 2) < 100
    np.testing.assert_allclose(
        decode_binary(narrow).scores[0].topk.logprobs,
        decode_binary(wide).scores[0].topk.logprobs,
        rtol=1e-3,
    )


def test_empty_completion_has_no_rows(qwen_teacher: TinyTeacher) -> None:
    (scored,) = scores_of(qwen_teacher.app, {"prompt": "a", "completion": ""})
    assert scored["token_ids"] == scored["topk_ids"] == scored["token_logprobs"] == []


def test_response_contains_exactly_the_candidates(qwen_teacher: TinyTeacher) -> None:
    sequence = {"prompt": "a", "completion": "7", "finished": True, "candidate_ids": [[5, 9], [0]]}
    (scored,) = scores_of(qwen_teacher.app, sequence)
    assert sorted(scored["topk_ids"][0]) == [5, 9]
    assert scored["topk_ids"][1] == [0, -1]
    assert scored["topk_logprobs"][1][1] is None
    assert scored["topk_logprobs"][1][0] == scored["token_logprobs"][1]


def test_concurrent_requests_have_the_scores_of_single_ones(qwen_teacher: TinyTeacher) -> None:
    app = qwen_teacher.app
    bodies = [
        {"sequences": [{"prompt": "the", "completion": f" fox {n} " * n}], "top_k": 1 + n % 3}
        for n in range(8)
    ]

    async def concurrent() -> list[httpx.Response]:
        return await asyncio.gather(*(post_async(app, body) for body in bodies))

    for body, response in zip(bodies, asyncio.run(concurrent()), strict=True):
        single = decode_json(post(app, body).json()).scores[0]
        batched = decode_json(response.json()).scores[0]
        assert batched.topk.ids.tolist() == single.topk.ids.tolist()
        np.testing.assert_allclose(batched.topk.logprobs, single.topk.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_served_tokenizer_matches_the_manifest(
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
    messages = SEQUENCE["messages"]
    assert "3 + 4 =" in loaded.apply_chat_template(messages, tokenize=False)


def test_manifest(qwen_teacher: TinyTeacher) -> None:
    body = get(qwen_teacher.app, "/v1/manifest").json()
    manifest = Manifest.parse(body)
    assert body["manifest_id"] == manifest.manifest_id == qwen_teacher.service.manifest.manifest_id
    assert (manifest.service, manifest.logit_width, manifest.tokenizer_size) == ("math", 448, 420)
    assert (manifest.max_model_len, manifest.max_top_k) == (256, 420)
    assert manifest.features.model_dump() == {
        "candidate_ids": True,
        "temperature": True,
        "messages": True,
        "exact_tails": True,
        "exact_text": True,
    }
    limited = teacher_of_family("qwen", top_k_max=5).service.manifest
    assert limited.max_top_k == 5
    assert limited.manifest_id == manifest.manifest_id  # a limit affects no score


def test_example_of_the_documentation_is_scored(qwen_teacher: TinyTeacher) -> None:
    assert get(qwen_teacher.app, "/docs").status_code == 200
    schema = get(qwen_teacher.app, "/openapi.json").json()
    (example,) = schema["components"]["schemas"]["LogprobsRequest"]["examples"]
    assert post(qwen_teacher.app, example).status_code == 200
    responses = schema["paths"]["/v1/logprobs"]["post"]["responses"]
    assert {*map(int, responses)} == {200, 400, 401, 404, 408, 413, 422, 429, 500, 503, 504}


def test_adjacent_sequences_share_the_tokens_of_their_prompt(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"prompt": "9 is", "completion": " 8"}
    sequences = [SEQUENCE, {**SEQUENCE, "completion": "8"}, other, {**other, "prompt": "1"}, other]
    expected = [scores_of(qwen_teacher.app, sequence, top_k=3)[0] for sequence in sequences]
    tokenized: list[object] = []
    prompt_ids = RequestTokenizer._prompt_ids

    def recorded(tokenizer: RequestTokenizer, sequence: SequenceRequest) -> list[int]:
        tokenized.append(sequence.prompt)
        return prompt_ids(tokenizer, sequence)

    monkeypatch.setattr(RequestTokenizer, "_prompt_ids", recorded)
    for scores, single in zip(
        scores_of(qwen_teacher.app, *sequences, top_k=3), expected, strict=True
    ):
        assert scores["token_ids"] == single["token_ids"]
        np.testing.assert_allclose(scores["token_logprobs"], single["token_logprobs"], atol=1e-5)
    assert tokenized == [None, "9 is", "1", "9 is"]
