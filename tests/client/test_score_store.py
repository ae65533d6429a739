"""What a teacher has once answered is not asked again, and what is read is what was answered."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_client.score_store import ScoreKey, ScoreStore
from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.counters import Counters
from mopd_protocol.errors import ConfigError
from mopd_protocol.requests import LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_server.app import create_app
from tests.client.scripted_teacher import ScriptedTeacher, manifest, network, scores_for
from tests.client.still_clock import StillClock
from tests.protocol.wire_values import assert_same
from tests.server.tiny_teachers import TinyTeacher, teacher_of_family

pytestmark = pytest.mark.anyio


def asking(*token_ids: int, **fields: Any) -> SequenceRequest:
    values = {"prompt": "?", "completion_token_ids": list(token_ids), **fields}
    return SequenceRequest(**{name: value for name, value in values.items() if value is not None})


def client_of(teacher: ScriptedTeacher, cache: ScoreStore | None) -> TeacherClient:
    return TeacherClient(
        "math",
        ["http://math"],
        transport=network(math=teacher),
        clock=StillClock().clock,
        cache=cache,
    )


def asked(teacher: ScriptedTeacher) -> list[list[int]]:
    """The completions of every sequence that was asked about."""
    return [
        sequence["completion_token_ids"]
        for question in teacher.requests_to("/v1/logprobs")
        for sequence in question.body["sequences"]
    ]


def assert_same_scores(found: list[TeacherScore], expected: list[TeacherScore]) -> None:
    """Bit for bit."""

    def response(scores: list[TeacherScore]) -> LogprobsResponse:
        return LogprobsResponse("m", tuple(None for _ in scores), tuple(scores))

    assert [score.manifest_id for score in found] == [score.manifest_id for score in expected]
    assert_same(response(found), response(expected))


async def test_what_was_answered_once_is_not_asked_again(tmp_path):
    teacher = ScriptedTeacher()
    for _ in range(2):  # a second client stands for a second run
        async with client_of(teacher, ScoreStore(tmp_path)) as client:
            scores = await client.score([asking(70, 71), asking(72)], top_k=1)
        assert [score.completion.token_ids.tolist() for score in scores] == [[70, 71], [72]]

    assert asked(teacher) == [[70, 71], [72]]
    counters = client.counters
    assert (counters.cache_hits, counters.cache_misses, counters.cache_corrupt) == (2, 0, 0)
    assert (counters.requests, counters.tokens_scored) == (0, 0)


async def test_only_the_missing_sequences_are_asked_for_and_the_order_is_kept(tmp_path):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([asking(71), asking(73)], top_k=1)
        wanted = [asking(70), asking(71), asking(72), asking(73), asking(70)]
        scores = await client.score(wanted, top_k=1)

    assert [score.completion.token_ids.tolist() for score in scores] == [
        [70],
        [71],
        [72],
        [73],
        [70],
    ]
    assert asked(teacher) == [[71], [73], [70], [72], [70]]
    assert (client.counters.cache_hits, client.counters.cache_misses) == (2, 5)


async def test_a_label_does_not_decide_the_answer(tmp_path):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([asking(70, id="a")], top_k=1)
        await client.score([asking(70, id="b")], top_k=1)

    assert asked(teacher) == [[70]]


DECISIVE: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "!"},
    "messages": {"prompt": None, "messages": [{"role": "user", "content": "?"}]},
    "another role": {"prompt": None, "messages": [{"role": "system", "content": "?"}]},
    "prompt ids": {"prompt": None, "prompt_token_ids": [5]},
    "completion ids": {"completion_token_ids": [70, 71]},
    "completion text": {"completion_token_ids": None, "completion": "7"},
    "completion parts": {"completion_token_ids": None, "completion": ["7"]},
    "control token": {"completion_token_ids": None, "completion": [{"control": "7"}]},
    "half a character": {"completion_token_ids": None, "completion": "\ud83d"},
    "finished": {"finished": True},
    "candidates": {"candidate_ids": [[5]]},
    "no candidates": {"candidate_ids": [[]]},
}


def test_all_that_affects_an_answer_is_in_the_key():
    plain, request = asking(70), LogprobsRequest(sequences=[asking(70)], top_k=2)
    keys = [ScoreKey.of("m", request, plain)]
    keys += [ScoreKey.of("m", request, asking(70, **changes)) for changes in DECISIVE.values()]
    for changes in ({"top_k": 3}, {"temperature": 0.5}, {"logprobs_dtype": "float16"}):
        keys.append(ScoreKey.of("m", request.model_copy(update=changes), plain))
    keys.append(ScoreKey.of("n", request, plain))

    assert len({key.digest for key in keys}) == len(keys)
    assert ScoreKey.of("m", request, asking(70, id="a")) == keys[0]


def test_no_field_of_a_request_is_forgotten():
    """A new field must be thought about: does it affect the answer, and is it in the key?"""
    assert set(LogprobsRequest.model_fields) == {
        "sequences",
        "top_k",
        "temperature",
        "logprobs_dtype",
    }


async def test_another_teacher_is_asked_anew(tmp_path):
    one, other = ScriptedTeacher(), ScriptedTeacher(manifest(revision="r2"))
    for teacher in (one, other):
        async with client_of(teacher, ScoreStore(tmp_path)) as client:
            [score] = await client.score([asking(70)], top_k=1)
        assert score.manifest_id == teacher.manifest.manifest_id

    assert asked(other) == [[70]]


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "another's", "no file type"])
async def test_a_damaged_file_is_a_miss_and_is_replaced_and_counted(tmp_path, damage):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([asking(70)], top_k=1)
        [path] = tmp_path.glob("??/*.safetensors")
        body = path.read_bytes()
        if damage == "another's":
            await client.score([asking(71)], top_k=1)
            [body] = [p.read_bytes() for p in tmp_path.glob("??/*.safetensors") if p != path]
        middle = len(body) - 3
        path.write_bytes(
            {
                "cut": body[:-1],
                "empty": b"",
                "flipped": body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :],
                "another's": body,
                "no file type": b"x" * 100,
            }[damage]
        )
        client.counters.pop()
        [score] = await client.score([asking(70)], top_k=1)
        assert score.completion.token_ids.tolist() == [70]
        assert (client.counters.cache_misses, client.counters.cache_corrupt) == (1, 1)

        await client.score([asking(70)], top_k=1)
        assert client.counters.cache_hits == 1


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_no_flipped_bit_is_ever_believed(one_file, position, bit):
    """A flip is either refused, or fell where it changes nothing (spaces of the header)."""
    cache, key, expected, body = one_file
    at = position % len(body)
    cache.path_of(key).write_bytes(body[:at] + bytes([body[at] ^ (1 << bit)]) + body[at + 1 :])
    counters = Counters()
    [found] = asyncio.run(cache.read([key], counters))
    if found is None:
        assert counters.cache_corrupt == 1
    else:
        assert_same_scores([found], [expected])


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    cache = ScoreStore(tmp_path_factory.mktemp("cache"))
    sequence = asking(70, 71, 72)
    request = LogprobsRequest(sequences=[sequence], top_k=1)
    score = scores_for(request, manifest()).scores[0]
    key = ScoreKey.of(score.manifest_id, request, sequence)
    asyncio.run(cache.write({key: score}, "float32", Counters()))
    return cache, key, score, cache.path_of(key).read_bytes()


async def test_the_least_recently_used_scores_go_when_there_is_no_room(tmp_path):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([asking(70)], top_k=1)
    [path] = tmp_path.glob("??/*.safetensors")
    size = path.stat().st_size

    cache = ScoreStore(tmp_path, max_bytes=4 * size)
    async with client_of(teacher, cache) as client:
        os.utime(path, ns=(0, 0))
        for token in (71, 72, 73):
            before = {*tmp_path.glob("??/*.safetensors")}
            await client.score([asking(token)], top_k=1)
            [written] = {*tmp_path.glob("??/*.safetensors")} - before
            os.utime(written, ns=(0, token))  # a clock may be too coarse to tell them apart
        await client.score([asking(70)], top_k=1)  # read, so not the first to go
        await client.score([asking(74)], top_k=1)
        assert 3 * size <= bytes_in(tmp_path) <= 4 * size
        questions = len(asked(teacher))
        await client.score([asking(70), asking(74)], top_k=1)
        assert len(asked(teacher)) == questions
        await client.score([asking(71)], top_k=1)
        assert len(asked(teacher)) == questions + 1


async def test_a_cache_that_was_too_large_shrinks_with_the_next_score(tmp_path):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([asking(token) for token in range(70, 90)], top_k=1)
    full = bytes_in(tmp_path)
    async with client_of(teacher, ScoreStore(tmp_path, max_bytes=full // 4)) as client:
        await client.score([asking(90)], top_k=1)

    assert 0 < bytes_in(tmp_path) <= full // 4


async def test_a_full_disk_costs_only_the_cache_and_leaves_no_half_file(tmp_path, monkeypatch):
    teacher = ScriptedTeacher()

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_bytes", broken)
            assert len(await client.score([asking(70)], top_k=1)) == 1
        assert client.counters.cache_unwritten == 1
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

        await client.score([asking(70)], top_k=1)
        await client.score([asking(70)], top_k=1)

    assert client.counters.cache_hits == 1


def test_a_cache_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="may hold 0 bytes; expected more than 0"):
        ScoreStore(tmp_path, max_bytes=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"score cache .*file: File exists"):
        ScoreStore(tmp_path / "file")


@dataclass(frozen=True)
class Served:
    """A real teacher and what to ask it."""

    teacher: TinyTeacher
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    return Served(teacher_of_family("qwen"), tmp_path_factory.mktemp("cache"))


tokens = st.lists(st.integers(70, 400), max_size=4)


@st.composite
def sequences(draw) -> SequenceRequest:
    """What a run may ask: text or ids, finished or not, with candidates or without."""
    completion = draw(st.one_of(st.text("ab 12é", max_size=6), tokens))
    finished = draw(st.booleans())
    candidates = None
    if isinstance(completion, list) and draw(st.booleans()):
        rows = st.lists(st.integers(70, 400), min_size=1, max_size=5, unique=True)
        candidates = [draw(rows) for _ in range(len(completion) + finished)]
    kind = "completion" if isinstance(completion, str) else "completion_token_ids"
    return SequenceRequest(
        prompt=draw(st.sampled_from(["?", "1 +"])),
        finished=finished,
        candidate_ids=candidates,
        **{kind: completion},
    )


@given(
    # Each once: the same text twice in a batch may be scored a rounding apart, and one is kept.
    asked=st.lists(sequences(), min_size=1, max_size=3, unique_by=repr),
    top_k=st.integers(1, 5),
    temperature=st.sampled_from([1.0, 0.5]),
    dtype=st.sampled_from(["float32", "float16"]),
)
@settings(max_examples=40, deadline=None)
def test_a_cached_answer_is_the_answer_bit_for_bit(served, asked, top_k, temperature, dtype):
    cache = ScoreStore(served.folder)

    async def answer(kept: ScoreStore | None) -> tuple[list[TeacherScore], int]:
        transport = httpx.ASGITransport(create_app(served.teacher.service))
        async with TeacherClient("math", ["http://math"], transport=transport, cache=kept) as math:
            scores = await math.score(
                asked, top_k=top_k, temperature=temperature, logprobs_dtype=dtype
            )
            return scores, math.counters.cache_hits

    async def all_answers() -> None:
        first, _ = await answer(cache)
        cached, hits = await answer(cache)
        assert hits == len(asked)
        assert_same_scores(cached, first)

    asyncio.run(all_answers())


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("??/*.safetensors"))
