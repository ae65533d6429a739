"""No changed response of a real teacher behind a real proxy is accepted."""

import json
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from starlette.responses import Response

from mopd_client.teacher_client import TeacherClient
from mopd_protocol.codec import decode_binary, encode_binary
from mopd_protocol.errors import DataError, InvalidResponseError, MopdError
from mopd_protocol.manifest import MANIFEST_HEADER
from mopd_protocol.requests import REQUEST_HEADER, SequenceRequest
from mopd_protocol.samples import Message, TeacherScore
from tests import tiny_models
from tests.client.lying_proxy import LIES, LyingProxy, proxy_app, serving
from tests.client.token_lies import CONTROL_LIES, TOKEN_LIES, VALUE_LIES, WORDS, without_token
from tests.server.tiny_teachers import teacher_of

pytestmark = pytest.mark.anyio

TOP_K = 16
OTHER_MANIFEST = "1f3a" * 8


def digits(seed: int, count: int = 24) -> str:
    """Return random digits, which are one token each."""
    return "".join(map(str, np.random.default_rng(seed).integers(0, 10, count)))


#: Digits only, so that two completions have as many rows; the last one has ended its turn.
SEQUENCES = [
    SequenceRequest(prompt="the quick", completion=digits(1)),
    SequenceRequest(prompt="the lazy", completion=digits(2)),
    SequenceRequest(
        messages=[Message(role="user", content="3 + 4 =")], completion=digits(3), finished=True
    ),
]
OTHERS = [sequence.model_copy(update={"completion": digits(9)}) for sequence in SEQUENCES]


@dataclass(frozen=True)
class Setup:
    """A proxy in front of a teacher, and a client that made its handshake before the proxy lies."""

    proxy: LyingProxy
    client: TeacherClient

    async def score(
        self, sequences: list[SequenceRequest] = SEQUENCES, **options: Any
    ) -> list[TeacherScore]:
        """Score through the proxy."""
        return await self.client.score(sequences, **{"top_k": TOP_K, **options})

    async def rejection(self, sequences: list[SequenceRequest] = SEQUENCES) -> MopdError | None:
        """Return the error of a request; None if the response is accepted."""
        try:
            await self.score(sequences)
        except MopdError as error:
            return error
        return None


@pytest.fixture(scope="module")
def address() -> Generator[tuple[LyingProxy, str]]:
    tokenizer = tiny_models.digit_tokenizer()
    model = tiny_models.qwen(tokenizer)
    # Half of the digits are likely, and half unlikely: completions have both kinds of rows.
    rows = torch.tensor(tokenizer.convert_tokens_to_ids([*"0123456789"]))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.5)[rows] *= 40
    with serving(teacher_of(model, tokenizer).app) as upstream:
        proxy = LyingProxy(upstream)
        with serving(proxy_app(proxy)) as url:
            yield proxy, url


@pytest.fixture
async def setup(address: tuple[LyingProxy, str]) -> AsyncGenerator[Setup]:
    proxy, url = address
    proxy.lie = proxy.raw = proxy.request = None
    proxy.forged, proxy.binary = False, True
    async with TeacherClient("math", [url], verify=0) as client:
        await client.handshake()
        yield Setup(proxy, client)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("forged", [True, False])
async def test_an_honest_proxy_is_believed(setup: Setup, binary: bool, forged: bool) -> None:
    setup.proxy.lie, setup.proxy.forged, setup.proxy.binary = (
        (lambda document: None),
        forged,
        binary,
    )
    candidates = SequenceRequest(
        prompt="a", completion_token_ids=[8, 9], candidate_ids=[[8, 7, 30], [11]]
    )
    scores = await setup.score()
    inside = [(score.topk.ids == score.token_ids[:, None]).any(axis=1).mean() for score in scores]
    assert 0.2 < np.mean(inside) < 0.9  # both kinds of rows
    await setup.score([candidates])
    setup.proxy.lie = None
    await setup.score([*SEQUENCES, candidates], logprobs_dtype="float16", top_k=420)
    await setup.score(temperature=0.3)


async def test_every_lie_is_rejected_and_named(setup: Setup) -> None:
    tried, believed = 0, []
    for name, lie in LIES.items():
        for binary in (True, False):
            for forged in (True, False):
                if forged and lie.key == "checksum":
                    continue  # less than any rounding, and consistent
                setup.proxy.lie, setup.proxy.binary, setup.proxy.forged = lie.change, binary, forged
                tried += 1
                error = await setup.rejection()
                keys = lie.key.split() if forged else [*lie.key.split(), "checksum"]
                if error is None or (error.key not in keys and "body" not in keys):
                    believed.append((name, binary, forged, error and error.key, str(error)))
                elif error.key != "manifest_id":
                    assert isinstance(error, InvalidResponseError), error
                    assert error.code == "invalid_response"
    print(f"{tried - len(believed)} / {tried} caught")  # noqa: T201
    assert not believed
    assert len(LIES) > 25


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("tokenizer", [True, False])
async def test_other_tokens_of_the_same_text_are_rejected(
    setup: Setup, binary: bool, tokenizer: bool
) -> None:
    setup.proxy.binary, setup.proxy.forged = binary, True
    if tokenizer:
        await setup.client.tokenizer()
    setup.proxy.lie = lambda document: None
    await setup.score(WORDS)
    for name, lie in (TOKEN_LIES if tokenizer else CONTROL_LIES).items():
        setup.proxy.lie = lie.change
        error = await setup.rejection(WORDS)
        assert isinstance(error, InvalidResponseError), name
        assert error.key in lie.key.split(), (name, error)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", VALUE_LIES)
async def test_impossible_values_are_rejected(setup: Setup, binary: bool, name: str) -> None:
    setup.proxy.binary, setup.proxy.forged = binary, True
    setup.proxy.lie = VALUE_LIES[name].change
    error = await setup.rejection()
    assert isinstance(error, InvalidResponseError)
    assert error.key == VALUE_LIES[name].key


async def test_a_candidate_that_is_the_token_has_an_entry(setup: Setup) -> None:
    candidates = SequenceRequest(
        prompt="a", completion_token_ids=[8, 9], candidate_ids=[[8, 7, 30], [11, 9]]
    )
    setup.proxy.forged = True
    setup.proxy.lie = without_token
    error = await setup.rejection([candidates])
    assert isinstance(error, InvalidResponseError)
    assert error.key == "candidate_ids"


async def test_another_precision_is_rejected(setup: Setup) -> None:
    def rounded(true: httpx.Response) -> Response:
        body = encode_binary(decode_binary(true.content), "float16")
        return Response(body, 200, _kept(true))

    setup.proxy.raw = rounded
    error = await setup.rejection()
    assert isinstance(error, InvalidResponseError)
    assert error.key == "logprobs_dtype"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("temperature"),
        lambda body: body["sequences"][0].update(prompt="the  quick"),
        lambda body: body["sequences"][2]["messages"][0].update(content="4 + 3 ="),
        lambda body: body["sequences"][2].update(chat_template_kwargs={"plain": True}),
    ],
)
async def test_a_request_changed_on_its_way_is_rejected(
    setup: Setup, change: Callable[[dict[str, Any]], object]
) -> None:
    await setup.score(temperature=0.5)

    def changed(body: bytes) -> bytes:
        document = json.loads(body)
        change(document)
        return json.dumps(document).encode()

    setup.proxy.request = changed
    with pytest.raises(InvalidResponseError) as caught:
        await setup.score(temperature=0.5)
    assert caught.value.key == REQUEST_HEADER


@pytest.mark.parametrize("media_type", ["text/html", "application/problem+json", ""])
async def test_other_content_types_are_rejected(setup: Setup, media_type: str) -> None:
    setup.proxy.raw = lambda true: Response(
        true.content, 200, _kept(true) | {"content-type": media_type}
    )
    error = await setup.rejection()
    assert isinstance(error, InvalidResponseError)
    assert error.key == "content-type"


@pytest.mark.parametrize("binary", [True, False])
async def test_the_response_to_another_request_is_rejected(setup: Setup, binary: bool) -> None:
    setup.proxy.binary = binary
    for earlier in (SEQUENCES, OTHERS):
        setup.proxy.raw = None
        await setup.score(earlier)
        body = setup.proxy.last_body
        setup.proxy.raw = lambda true, body=body: Response(body, 200, _kept(true))
        error = await setup.rejection()
        assert isinstance(error, InvalidResponseError)
        assert error.key == "ids"


@pytest.mark.parametrize(
    ("status", "sequence"),
    [
        (200, SEQUENCES[0]),
        (400, SequenceRequest(prompt="a", completion_token_ids=[10**6])),
        (413, SequenceRequest(prompt="a", completion=digits(1, 400))),
        (422, SequenceRequest(prompt="a", completion=[{"control": "<|none|>"}])),  # pyright: ignore
    ],
)
async def test_the_manifest_is_checked_on_every_status(
    setup: Setup, status: int, sequence: SequenceRequest
) -> None:
    def without(true: httpx.Response) -> Response:
        assert true.status_code == status
        headers = {"content-type": true.headers["content-type"]}
        return Response(true.content, true.status_code, headers)

    def swapped(true: httpx.Response) -> Response:
        return Response(
            true.content, true.status_code, {**_kept(true), MANIFEST_HEADER: OTHER_MANIFEST}
        )

    setup.proxy.raw = without
    error = await setup.rejection([sequence])
    assert isinstance(error, InvalidResponseError)
    assert (error.key, error.status) == (MANIFEST_HEADER, status)
    setup.proxy.raw = swapped
    error = await setup.rejection([sequence])
    # Not a TeacherError, which on_error: drop would tolerate.
    assert type(error) is DataError
    assert error.key == "manifest_id"


@pytest.mark.parametrize("body", [b"<html>", b"", b"{}", b"\x00" * 64, b"[" * 10**5])
async def test_other_bodies_are_rejected(setup: Setup, body: bytes) -> None:
    for kept in (True, False):
        setup.proxy.raw = lambda true, kept=kept: Response(
            body, 200, _kept(true) | ({} if kept else {"content-type": "application/json"})
        )
        error = await setup.rejection()
        assert isinstance(error, InvalidResponseError)
        assert error.key == "body"


async def test_damaged_bytes_are_rejected(setup: Setup) -> None:
    """Every sixth byte of a binary body, one bit each: all but the timings are covered."""
    await setup.score(SEQUENCES[:1], top_k=2)
    body = bytearray(setup.proxy.last_body)
    true = decode_binary(bytes(body))
    for position in range(0, len(body), 6):
        body[position] ^= 1
        try:
            damaged = decode_binary(bytes(body))
        except DataError:
            pass
        else:  # a space of the header, or a digit of a duration
            assert (
                damaged.scores[0].topk.logprobs.tobytes() == true.scores[0].topk.logprobs.tobytes()
            )
            assert damaged.scores[0].token_ids.tobytes() == true.scores[0].token_ids.tobytes()
        body[position] ^= 1


_KEPT = ("content-type", MANIFEST_HEADER, REQUEST_HEADER)


def _kept(true: httpx.Response) -> dict[str, str]:
    return {name: true.headers[name] for name in _KEPT}
