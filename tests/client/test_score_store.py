"""Stored scores are not requested again, and are loaded bit for bit."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_client.score_store import ScoreKey, ScoreStore, Shard, load_shard
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.requests import LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_server.app import create_app
from tests.client.scripted_teacher import ScriptedTeacher, manifest, network, scores_for
from tests.client.still_clock import StillClock
from tests.protocol.wire_values import assert_same
from tests.server.tiny_teachers import TinyTeacher, teacher_of_family

pytestmark = pytest.mark.anyio


def sequence(*token_ids: int, **fields: Any) -> SequenceRequest:
    values = {"prompt": "?", "completion_token_ids": list(token_ids), **fields}
    return SequenceRequest(**{name: value for name, value in values.items() if value is not None})


def client_of(teacher: ScriptedTeacher, cache: ScoreStore | None) -> TeacherClient:
    return TeacherClient(
        "math",
        ["http://math"],
        transport=network(math=teacher),
        clock=StillClock().clock,
        cache=cache,
        verify=0,
    )


def requested(teacher: ScriptedTeacher) -> list[list[int]]:
    """Completions of all requested sequences."""
    return [
        item["completion_token_ids"]
        for request in teacher.requests_to("/v1/logprobs")
        for item in request.body["sequences"]
    ]


def assert_same_scores(scores: list[TeacherScore], expected: list[TeacherScore]) -> None:
    """Bit for bit."""

    def response(items: list[TeacherScore]) -> LogprobsResponse:
        return LogprobsResponse("m", tuple(None for _ in items), tuple(items))

    assert [score.manifest_id for score in scores] == [score.manifest_id for score in expected]
    assert_same(response(scores), response(expected))


async def test_a_stored_score_is_not_requested_again(tmp_path):
    teacher = ScriptedTeacher()
    for _ in range(2):  # the second client is that of a second run
        async with client_of(teacher, ScoreStore(tmp_path)) as client:
            scores = await client.score([sequence(70, 71), sequence(72)], top_k=1)
        assert [score.completion.token_ids.tolist() for score in scores] == [[70, 71], [72]]

    assert requested(teacher) == [[70, 71], [72]]
    counters = client.counters
    assert (counters.cache_hits, counters.cache_misses, counters.cache_corrupt) == (2, 0, 0)
    assert (counters.requests, counters.tokens_scored) == (0, 0)


async def test_only_missing_sequences_are_requested_and_the_order_is_kept(tmp_path):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([sequence(71), sequence(73)], top_k=1)
        batch = [sequence(70), sequence(71), sequence(72), sequence(73), sequence(70)]
        scores = await client.score(batch, top_k=1)

    assert [score.completion.token_ids.tolist() for score in scores] == [
        [70],
        [71],
        [72],
        [73],
        [70],
    ]
    assert requested(teacher) == [[71], [73], [70], [72], [70]]
    assert (client.counters.cache_hits, client.counters.cache_misses) == (2, 5)


async def test_the_id_of_a_sequence_is_not_part_of_the_key(tmp_path):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([sequence(70, id="a")], top_k=1)
        await client.score([sequence(70, id="b")], top_k=1)

    assert requested(teacher) == [[70]]


CHANGES: dict[str, dict[str, Any]] = {
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


def test_everything_that_affects_a_score_is_in_the_key():
    plain, request = sequence(70), LogprobsRequest(sequences=[sequence(70)], top_k=2)
    keys = [ScoreKey.of("m", request, plain)]
    keys += [ScoreKey.of("m", request, sequence(70, **changes)) for changes in CHANGES.values()]
    for changes in ({"top_k": 3}, {"temperature": 0.5}, {"logprobs_dtype": "float16"}):
        keys.append(ScoreKey.of("m", request.model_copy(update=changes), plain))
    keys.append(ScoreKey.of("n", request, plain))

    assert len({key.digest for key in keys}) == len(keys)
    assert ScoreKey.of("m", request, sequence(70, id="a")) == keys[0]


def test_a_new_field_of_a_request_needs_a_decision():
    """Add a new field to the key if it affects scores."""
    assert set(LogprobsRequest.model_fields) == {
        "sequences",
        "top_k",
        "temperature",
        "logprobs_dtype",
    }


async def test_scores_of_another_teacher_are_requested(tmp_path):
    first, second = ScriptedTeacher(), ScriptedTeacher(manifest(revision="r2"))
    for teacher in (first, second):
        async with client_of(teacher, ScoreStore(tmp_path)) as client:
            [score] = await client.score([sequence(70)], top_k=1)
        assert score.manifest_id == teacher.manifest.manifest_id

    assert requested(second) == [[70]]


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "another's", "no file type"])
async def test_a_damaged_shard_is_counted_and_replaced(tmp_path, damage):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([sequence(70)], top_k=1)
        [path] = tmp_path.glob("*/*.safetensors")
        body = path.read_bytes()
        if damage == "another's":
            await client.score([sequence(71)], top_k=1)
            [body] = [p.read_bytes() for p in tmp_path.glob("*/*.safetensors") if p != path]
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
        [score] = await client.score([sequence(70)], top_k=1)
        assert score.completion.token_ids.tolist() == [70]
        assert (client.counters.cache_misses, client.counters.cache_corrupt) == (1, 1)

        await client.score([sequence(70)], top_k=1)
        assert client.counters.cache_hits == 1


@pytest.fixture(scope="module")
def shard(tmp_path_factory) -> tuple[Path, bytes]:
    """A saved shard and its content."""
    request = LogprobsRequest(sequences=[sequence(70, 71, 72)], top_k=1)
    response = scores_for(request, manifest())
    encoded = Shard.of(response.manifest_id, ["key"], response.scores)
    return encoded.save(tmp_path_factory.mktemp("store")), encoded.body


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_every_flipped_bit_is_detected(shard, position, bit):
    path, body = shard
    at = position % len(body)
    path.write_bytes(body[:at] + bytes([body[at] ^ (1 << bit)]) + body[at + 1 :])
    with pytest.raises(DataError) as caught:
        load_shard(path)
    assert caught.value.key == str(path)


async def test_stores_of_two_processes_see_each_others_scores(tmp_path):
    teacher = ScriptedTeacher()
    stores = [ScoreStore(tmp_path), ScoreStore(tmp_path)]
    for token in (70, 71):
        for store in stores:
            async with client_of(teacher, store) as client:
                await client.score([sequence(token)], top_k=1)
        stores.reverse()

    assert requested(teacher) == [[70], [71]]


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
async def test_a_shard_damaged_between_runs_is_counted_and_replaced(tmp_path, damage):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([sequence(70)], top_k=1)
    [path] = tmp_path.glob("*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([sequence(70)], top_k=1)
        await client.score([sequence(70)], top_k=1)
    counters = client.counters
    assert (counters.cache_hits, counters.cache_misses, counters.cache_corrupt) == (1, 1, 1)


def _make_folder(path: Path) -> None:
    path.unlink()
    (path / "notes").mkdir(parents=True)


def _link(target: str) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        path.symlink_to(path.parent / target)

    return replace


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _forge(path: Path) -> None:
    """Write a header whose ids are no strings."""
    metadata = {"__metadata__": {"mopd": json.dumps({"ids": [{}]})}}
    header = json.dumps(metadata).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def _nest(path: Path) -> None:
    header = b"[" * 100_000
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def _replace_folder(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("no folder")


@pytest.mark.parametrize(
    ("damage", "corrupt"),
    [
        (_make_folder, 1),
        (_link("missing"), 0),
        (lambda path: _link(path.name)(path), 1),  # a loop
        (_pipe, 1),
        (_forge, 1),
        (_nest, 1),
        (_replace_folder, 0),
    ],
)
async def test_what_is_no_shard_costs_the_shard(tmp_path, damage, corrupt):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([sequence(70)], top_k=1)
        await client.score([sequence(71)], top_k=1)
    damage(next(tmp_path.glob("*/*.safetensors")))
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        for token in (70, 71, 72, 70):
            [score] = await client.score([sequence(token)], top_k=1)
            assert score.completion.token_ids.tolist() == [token]
    assert client.counters.cache_corrupt == corrupt
    assert client.counters.failures == 0


@pytest.mark.parametrize("call", ["open", "read_bytes", "unlink", "iterdir", "stat"])
async def test_a_store_without_permissions_costs_no_run(tmp_path, monkeypatch, call):
    """Permissions do not bind the superuser, so that the call itself fails."""
    teacher = ScriptedTeacher()
    actual = getattr(Path, call)

    def denied(path: Path, *arguments: Any, **options: Any) -> Any:
        if tmp_path in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return actual(path, *arguments, **options)

    store = ScoreStore(tmp_path)
    async with client_of(teacher, store) as client:
        await client.score([sequence(70)], top_k=1)
        for path in tmp_path.glob("*/*.safetensors"):
            size = path.stat().st_size
            if call == "unlink":
                path.write_bytes(b"x")
    for cache in (ScoreStore(tmp_path, max_bytes=size), store):
        with monkeypatch.context() as patched:
            patched.setattr(Path, call, denied)
            async with client_of(teacher, cache) as client:
                for token in (70, 71):
                    [score] = await client.score([sequence(token)], top_k=1)
                    assert score.completion.token_ids.tolist() == [token]
        assert client.counters.failures == 0


async def test_scores_of_one_batch_share_a_shard(tmp_path):
    async with client_of(ScriptedTeacher(), ScoreStore(tmp_path)) as client:
        await client.score([sequence(token) for token in range(70, 80)], top_k=1)
    assert len([*tmp_path.glob("*/*.safetensors")]) == 1


async def test_the_least_recently_used_shards_are_evicted(tmp_path):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        await client.score([sequence(70)], top_k=1)
    [path] = tmp_path.glob("*/*.safetensors")
    size = path.stat().st_size

    cache = ScoreStore(tmp_path, max_bytes=4 * size)
    async with client_of(teacher, cache) as client:
        os.utime(path, ns=(0, 0))
        for token in (71, 72, 73):
            before = {*tmp_path.glob("*/*.safetensors")}
            await client.score([sequence(token)], top_k=1)
            [written] = {*tmp_path.glob("*/*.safetensors")} - before
            os.utime(written, ns=(0, token))  # the resolution of the clock may be too coarse
        await client.score([sequence(70)], top_k=1)  # most recently used
        await client.score([sequence(74)], top_k=1)
        assert 3 * size <= bytes_in(tmp_path) <= 4 * size
        requests = len(requested(teacher))
        await client.score([sequence(70), sequence(74)], top_k=1)
        assert len(requested(teacher)) == requests
        await client.score([sequence(71)], top_k=1)
        assert len(requested(teacher)) == requests + 1


async def test_a_store_above_a_new_limit_shrinks_with_the_next_write(tmp_path):
    teacher = ScriptedTeacher()
    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        for token in range(70, 90):
            await client.score([sequence(token)], top_k=1)
    full = bytes_in(tmp_path)
    async with client_of(teacher, ScoreStore(tmp_path, max_bytes=full // 4)) as client:
        await client.score([sequence(90)], top_k=1)

    assert 0 < bytes_in(tmp_path) <= full // 4


async def test_a_full_disk_disables_only_the_cache(tmp_path, monkeypatch):
    teacher = ScriptedTeacher()

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with client_of(teacher, ScoreStore(tmp_path)) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_bytes", broken)
            assert len(await client.score([sequence(70)], top_k=1)) == 1
        assert client.counters.cache_unwritten == 1
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

        await client.score([sequence(70)], top_k=1)
        await client.score([sequence(70)], top_k=1)

    assert client.counters.cache_hits == 1


def test_an_invalid_limit_or_folder_raises(tmp_path):
    (tmp_path / "file").write_text("")
    for path, limit, key in ((tmp_path, 0, "max_gigabytes"), (tmp_path / "file", 1, "path")):
        with pytest.raises(ConfigError) as caught:
            ScoreStore(path, max_bytes=limit)
        assert caught.value.key == f"score_cache.{key}"


@dataclass(frozen=True)
class Served:
    """A teacher and the folder of its store."""

    teacher: TinyTeacher
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    return Served(teacher_of_family("qwen"), tmp_path_factory.mktemp("cache"))


tokens = st.lists(st.integers(70, 400), max_size=4)


@st.composite
def sequences(draw) -> SequenceRequest:
    """Sequences with text or ids, finished or not, with candidates or without."""
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
    # Unique, as duplicates in a batch may differ by rounding, and only one is stored.
    batch=st.lists(sequences(), min_size=1, max_size=3, unique_by=repr),
    top_k=st.integers(1, 5),
    temperature=st.sampled_from([1.0, 0.5]),
    dtype=st.sampled_from(["float32", "float16"]),
)
@settings(max_examples=40, deadline=None)
def test_a_stored_score_is_loaded_bit_for_bit(served, batch, top_k, temperature, dtype):
    cache = ScoreStore(served.folder)

    async def score(kept: ScoreStore | None) -> tuple[list[TeacherScore], int]:
        transport = httpx.ASGITransport(create_app(served.teacher.service))
        client = TeacherClient("math", ["http://math"], transport=transport, cache=kept, verify=0)
        async with client as math:
            scores = await math.score(
                batch, top_k=top_k, temperature=temperature, logprobs_dtype=dtype
            )
            return scores, math.counters.cache_hits

    async def compare() -> None:
        first, _ = await score(cache)
        cached, hits = await score(cache)
        assert hits == len(batch)
        assert_same_scores(cached, first)

    asyncio.run(compare())


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
