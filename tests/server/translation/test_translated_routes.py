"""Scores in a student's ids through the routes, in the teacher's process and behind a gateway."""

from collections.abc import Iterator

import numpy as np
import pytest

from mopd_losses.translation.translation import ExtraRow
from mopd_protocol.manifest import Manifest
from mopd_protocol.samples import Message
from mopd_server.engines.base import ScoringTask
from tests.client.still_clock import StillClock
from tests.server.tiny_teachers import problem, request_async
from tests.server.translation.translated_teachers import (
    FACTS,
    TranslatedTeacher,
    completions,
    rows_of,
    translated_teacher,
)

pytestmark = pytest.mark.anyio

USER = [Message(role="user", content="3 + 4 =")]
TURNS = [
    Message(role="user", content="the dog"),
    Message(role="assistant", content="a fox"),
    Message(role="user", content="12 items"),
]
NEAR = 1e-5
K = 4


@pytest.fixture(scope="module", params=["serve", "gateway"])
def translated(request: pytest.FixtureRequest) -> Iterator[TranslatedTeacher]:
    teacher = translated_teacher("qwen", gateway=request.param == "gateway", extra_rounds=2)
    yield teacher
    teacher.service.close()


def assert_near(actual: object, expected: object) -> None:
    """Compare two objects of ``prompt_logprobs``."""
    assert isinstance(actual, dict)
    assert isinstance(expected, dict)
    assert actual.keys() == expected.keys()
    for token, entry in actual.items():
        assert entry["logprob"] == pytest.approx(expected[token]["logprob"], abs=NEAR)
        # Translated rows do not know ranks below the requested entries.
        assert entry["rank"] == min(expected[token]["rank"], K + 1)


@pytest.mark.parametrize("messages", [USER, TURNS], ids=["one turn", "several turns"])
async def test_equal_tokenizers_get_the_teachers_own_values(translated, messages) -> None:
    start, ids = translated.ids(messages, "the sum is 7", translated.end)

    rows = await rows_of(translated.app, ids)
    own = await rows_of(translated.plain, ids)

    assert rows[:start] == [None] * start
    assert len(rows) == len(own) == len(ids)
    for actual, expected in zip(rows[start:], own[start:], strict=True):
        assert_near(actual, expected)


async def test_several_sequences_have_their_own_rows(translated) -> None:
    sequences = [translated.ids(USER, "7")[1], translated.ids(TURNS, "a fox 15")[1]]

    response = await completions(translated.app, sequences)

    assert response.status_code == 200
    for sequence, choice in zip(sequences, response.json()["choices"], strict=True):
        own = await rows_of(translated.plain, sequence)
        start = choice["mopd_coverage"]["prompt_tokens"]
        for actual, expected in zip(choice["prompt_logprobs"][start:], own[start:], strict=True):
            assert_near(actual, expected)


async def test_one_number_a_token_for_generate(translated) -> None:
    start, ids = translated.ids(USER, "it is 7", translated.end)
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    body |= {"logprob_start_len": 0}

    response = await request_async(translated.app, "POST", "/generate", body)
    own = await request_async(translated.plain, "POST", "/generate", body)

    meta = response.json()["meta_info"]
    values = [entry[0] for entry in meta["input_token_logprobs"]]
    expected = [entry[0] for entry in own.json()["meta_info"]["input_token_logprobs"]]
    assert values[0] is None
    assert values[1:start] == [0.0] * (start - 1)
    assert values[start:] == pytest.approx(expected[start:], abs=NEAR)
    assert meta["mopd_coverage"]["prompt_tokens"] == start


async def test_ids_behind_the_end_and_without_a_token_have_no_text(translated) -> None:
    padded = translated.teacher.tokenizer.table.size + 3
    start, ids = translated.ids(USER, "it", padded, " is", translated.end, "7 7")
    clean = translated.ids(USER, "it is", translated.end)[1]

    response = await completions(translated.app, [ids])
    choice = response.json()["choices"][0]
    rows = choice["prompt_logprobs"]

    # The text before the padded id has the same continuations without that id.
    following = rows[ids.index(padded) + 1]
    entries = rows[ids.index(padded)]
    assert len(entries) == K
    assert entries.items() <= following.items()
    end = ids.index(translated.end, start)
    assert rows[end + 1 :] == [None] * (len(ids) - end - 1)
    own = await rows_of(translated.plain, clean)
    for row, expected in zip(
        [row for at, row in enumerate(rows[start : end + 1], start) if ids[at] != padded],
        own[start:],
        strict=True,
    ):
        assert_near(row, expected)
    coverage = choice["mopd_coverage"]
    assert coverage["positions"] == len(ids) - start
    assert coverage["without_signal"] == len(ids) - end - 1


async def test_coverage_is_in_responses_metrics_and_the_manifest(translated) -> None:
    start, ids = translated.ids(USER, "the lazy dog", translated.end)
    rows = len(ids) - start
    before = await metrics_of(translated)
    translated.translator.lost, translated.translator.unknown = (0, 1), (1, 2)
    try:
        response = await completions(translated.app, [ids], k=2)
    finally:
        translated.translator.lost = translated.translator.unknown = ()

    [choice] = response.json()["choices"]
    coverage = choice["mopd_coverage"]
    assert coverage["prompt_tokens"] == start
    assert coverage["positions"] == rows
    assert coverage["without_signal"] == 2
    assert coverage["lost_top1"] == 1  # row 1 has no signal
    missing = [row is None for row in choice["prompt_logprobs"][start:]]
    assert [at for at, unknown in enumerate(missing) if unknown] == [1, 2]
    assert 0 < coverage["named_mass"] < 1
    after = await metrics_of(translated)
    assert after["positions"] - before["positions"] == rows
    assert after["positions_without_signal"] - before["positions_without_signal"] == 2
    assert after["lost_top1"] - before["lost_top1"] == 1
    assert after["named_mass"] - before["named_mass"] == pytest.approx(
        coverage["named_mass"] * (rows - 2)
    )
    manifest = await request_async(translated.app, "GET", "/v1/manifest")
    assert Manifest.parse(manifest.json()).translation == FACTS
    own = (await request_async(translated.plain, "GET", "/v1/manifest")).json()
    assert "translation" not in own


async def metrics_of(translated: TranslatedTeacher) -> dict[str, float]:
    text = (await request_async(translated.app, "GET", "/metrics")).text
    lines = [line.split() for line in text.splitlines() if line.startswith("mopd_translation_")]
    return {
        name.removeprefix("mopd_translation_").removesuffix("_total"): float(value)
        for name, value in lines
        if name.endswith("_total")
    }


async def test_extra_rows_are_those_of_the_extended_text(translated) -> None:
    start, ids = translated.ids(USER, "the lazy dog", translated.end)
    other = translated.teacher.tokenizer.encoder.encode(" quick")
    requested = [ExtraRow(0, 2, tuple(other)), ExtraRow(0, 0, ())]
    translated.translator.requested = requested
    try:
        response = await completions(translated.app, [ids], k=2)
    finally:
        translated.translator.requested = []

    assert response.json()["choices"][0]["mopd_coverage"]["extra_rows"] == 2
    assert set(translated.translator.known) == set(requested)
    for row, topk in translated.translator.known.items():
        context = [*ids[: start + row.teacher_tokens], *row.token_ids]
        task = ScoringTask(np.array(context, dtype=np.int32), np.array(ids[:1], dtype=np.int32))
        [expected] = translated.teacher.engine.score([task], top_k=16, temperature=1.0)
        assert topk.ids.tolist() == expected.ids.tolist()
        np.testing.assert_allclose(topk.logprobs, expected.logprobs, atol=NEAR)


async def test_losses_of_realised_tokens_get_no_others(translated) -> None:
    start, ids = translated.ids(USER, "the lazy dog", translated.end)
    translated.translator.unknown = (1,)  # without names, the probability of the text is known
    try:
        rows = await rows_of(translated.app, ids, headers={"Mopd-Loss": "token"})
    finally:
        translated.translator.unknown = ()
    own = await rows_of(translated.plain, ids)

    assert rows[:start] == [None] * start
    for token, row, expected in zip(ids[start:], rows[start:], own[start:], strict=True):
        assert [*row] == [str(token)]
        assert row[str(token)]["logprob"] == pytest.approx(
            expected[str(token)]["logprob"], abs=NEAR
        )


async def test_messages_of_the_request_need_no_known_prompt(translated) -> None:
    start, ids = translated.ids(USER, "7")
    messages = [message.model_dump() for message in USER]

    single = await completions(translated.app, ids, messages=messages)
    several = await completions(translated.app, [ids, ids], messages=[messages, messages])
    assert single.json()["choices"][0]["mopd_coverage"]["prompt_tokens"] == start
    assert len(several.json()["choices"]) == 2

    problem(await completions(translated.app, [ids, ids], messages=messages), 400, "malformed")
    other = [{"role": "user", "content": "3 + 5 ="}]
    problem(await completions(translated.app, ids, messages=other), 400, "unknown_prompt")
    problem(await completions(translated.plain, ids, messages=messages), 400, "malformed")


async def test_an_unknown_prompt_is_rejected_with_its_first_difference(translated) -> None:
    _, ids = translated.ids(USER, "7")

    response = await completions(translated.app, [ids, [*ids[1:], ids[1]]])

    detail = problem(response, 400, "unknown_prompt")["detail"]
    assert "prompt[1]" in detail
    assert "position 0" in detail


@pytest.mark.parametrize(
    ("headers", "fields", "status"),
    [
        ({}, {}, 200),  # TRL
        ({"Mopd-Loss": "tail"}, {"detokenize": False}, 200),
        ({"Mopd-Loss": "token"}, {}, 200),
        ({}, {"detokenize": False}, 400),  # verl
        ({"Mopd-Loss": "forward_kl_topk"}, {}, 400),
        ({"Mopd-Loss": "renormalised"}, {}, 400),
    ],
)
async def test_losses_without_a_tail_are_rejected_by_name(
    translated, headers, fields, status
) -> None:
    _, ids = translated.ids(USER, "7")

    response = await completions(translated.app, ids, headers=headers, **fields)

    assert response.status_code == status
    if status != 200:
        detail = problem(response, 400, "unsupported_loss")["detail"]
        assert headers.get("Mopd-Loss", "forward_kl_topk") in detail
    assert (await completions(translated.plain, ids, headers=headers, **fields)).status_code == 200


async def test_other_temperatures_and_fields_are_rejected(translated) -> None:
    _, ids = translated.ids(USER, "7")

    problem(await completions(translated.app, ids, temperature=0.7), 400, "malformed")
    problem(await completions(translated.app, ids, image="x"), 400, "malformed")
    long = translated.ids(USER, "the " * 400)[1]
    problem(await completions(translated.app, long), 413, "too_large")


async def test_the_other_routes_are_those_of_a_teacher(translated) -> None:
    models = (await request_async(translated.app, "GET", "/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["math"]
    for path in ("/health", "/readyz", "/metrics"):
        assert (await request_async(translated.app, "GET", path)).status_code == 200


@pytest.fixture
def gateway() -> Iterator[TranslatedTeacher]:
    teacher = translated_teacher("qwen", gateway=True, clock=StillClock().clock)
    yield teacher
    teacher.service.close()


async def test_a_gateway_without_its_teacher_is_unavailable(gateway) -> None:
    gateway.plain.state.lifecycle.abort("drained")

    response = await completions(gateway.app, gateway.ids(USER, "7")[1])

    assert problem(response, 503, "unavailable")
    assert int(response.headers["retry-after"]) > 0


async def test_a_gateway_crashes_if_its_teacher_has_changed(gateway) -> None:
    causes: list[str] = []
    gateway.service.on_engine_crash = causes.append
    teacher = gateway.plain.state.lifecycle.service
    teacher.manifests = {None: teacher.manifest.model_copy(update={"revision": "other"})}

    response = await completions(gateway.app, gateway.ids(USER, "7")[1])

    assert problem(response, 503, "engine_dead")
    assert len(causes) == 1
