"""An HTTP proxy in front of a teacher that changes responses: every lie of ``LIES``, with the
checksum of the true response or with one that the proxy has computed anew."""

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import uvicorn
from safetensors.numpy import save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mopd_protocol.codec import BINARY_MEDIA_TYPE, decode_binary, encode_json
from mopd_protocol.manifest import MANIFEST_HEADER
from mopd_protocol.requests import REQUEST_HEADER, body_hash

Document = dict[str, Any]
Sequence = dict[str, Any]

ROWS = ("topk_ids", "topk_logprobs", "tail_logprobs")
#: Tensor -> dtype, in the order of the checksum.
_DTYPES = {
    "offsets": np.int64,
    "token_ids": np.int32,
    "byte_ends": np.int32,
    "text": np.uint8,
    "text_offsets": np.int64,
    "topk_ids": np.int32,
    "topk_logprobs": np.float32,
    "token_logprobs": np.float32,
    "tail_logprobs": np.float32,
}


@dataclass(frozen=True)
class Lie:
    """A change of a response, and the key of the error that it must cause."""

    change: Callable[[Document], object]
    key: str
    """With a recomputed checksum; ``checksum`` for a change that nothing else can show."""


def of_sequences(change: Callable[[Sequence], object]) -> Callable[[Document], object]:
    """Apply a change to every sequence."""
    return lambda document: [change(sequence) for sequence in document["sequences"]]


def of_field(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Document], object]:
    """Replace a field of every sequence."""

    def apply(sequence: Sequence) -> None:
        sequence[name] = change(np.array(sequence[name]))

    return of_sequences(apply)


def rolled(*names: str) -> Callable[[Document], object]:
    """Roll rows by one."""
    return of_sequences(
        lambda sequence: sequence.update({n: np.roll(sequence[n], 1, axis=0) for n in names})
    )


def at(name: str, index: Any, value: float) -> Callable[[Document], object]:
    """Set one value of the first sequence."""

    def apply(document: Document) -> None:
        field = np.array(document["sequences"][0][name])
        field[index] = value
        document["sequences"][0][name] = field

    return apply


def swapped(*names: str) -> Callable[[Document], object]:
    """Swap fields of the first two sequences, which have as many rows."""

    def apply(document: Document) -> None:
        first, second, *_ = document["sequences"]
        for name in names:
            first[name], second[name] = second[name], first[name]

    return apply


def cut(columns: int) -> Callable[[Document], object]:
    """Keep the first entries of each row."""
    return of_sequences(
        lambda s: s.update({n: np.array(s[n])[:, :columns] for n in ("topk_ids", "topk_logprobs")})
    )


def padded(sequence: Sequence) -> None:
    """Replace all but two entries of each row by missing ones."""
    sequence["topk_ids"] = np.array(sequence["topk_ids"])
    sequence["topk_logprobs"] = np.array(sequence["topk_logprobs"])
    sequence["topk_ids"][:, 2:], sequence["topk_logprobs"][:, 2:] = -1, -np.inf


def widened(sequence: Sequence) -> None:
    """Add an unlikely entry to each row."""
    rows = len(sequence["topk_ids"])
    spare = [[min({*range(419)} - {*row})] for row in np.array(sequence["topk_ids"]).tolist()]
    sequence["topk_ids"] = np.hstack([sequence["topk_ids"], spare])
    sequence["topk_logprobs"] = np.hstack([sequence["topk_logprobs"], np.full((rows, 1), -60.0)])


def without_last_token(sequence: Sequence) -> None:
    """Drop the last token consistently."""
    for name in ("token_ids", "byte_ends", "token_logprobs", *ROWS):
        sequence[name] = sequence[name][:-1]
    last = len(sequence["token_ids"])
    sequence["marks"] = [mark for mark in sequence["marks"] if mark[0] < last]
    sequence["text"] = sequence["text"].encode()[: sequence["byte_ends"][-1]].decode()


def with_token_again(sequence: Sequence) -> None:
    """Repeat the first token consistently."""
    length = sequence["byte_ends"][0]
    for name in ("token_ids", "token_logprobs", *ROWS):
        sequence[name] = np.concatenate([sequence[name][:1], sequence[name]])
    sequence["byte_ends"] = [length, *(end + length for end in sequence["byte_ends"])]
    sequence["marks"] = [[position + 1, name] for position, name in sequence["marks"]]
    sequence["text"] = sequence["text"][:length] + sequence["text"]


def other_text(sequence: Sequence) -> None:
    """Change one letter."""
    text = sequence["text"]
    sequence["text"] = ("b" if text[0] == "a" else "a") + text[1:]


def flipped_bit(document: Document) -> None:
    """Flip the lowest bit of one float, which is less than any rounding."""
    values = np.array(document["sequences"][0]["tail_logprobs"], dtype=np.float32)
    values.view(np.uint32)[0] ^= 1
    document["sequences"][0]["tail_logprobs"] = values


def without_end(document: Document) -> None:
    """Replace the end of turn of the last sequence by a token without bytes."""
    document["sequences"][-1]["token_ids"][-1] = 2
    document["sequences"][-1]["marks"] = []


LIES: dict[str, Lie] = {
    "rows rolled": Lie(rolled(*ROWS), "token_logprobs"),
    "rows and token_logprobs rolled": Lie(rolled(*ROWS, "token_logprobs"), "token_logprobs"),
    "entries rolled": Lie(rolled("topk_ids", "topk_logprobs"), "token_logprobs"),
    "logprobs rolled": Lie(rolled("topk_logprobs"), "token_logprobs"),
    "token_logprobs rolled": Lie(rolled("token_logprobs"), "token_logprobs"),
    "ids rotated": Lie(of_field("topk_ids", lambda v: np.roll(v, 1, axis=1)), "token_logprobs"),
    "ids + 7": Lie(of_field("topk_ids", lambda v: (v + 7) % 420), "token_logprobs"),
    "flat": Lie(
        of_field("topk_logprobs", lambda v: np.full_like(v, -np.log(420))), "token_logprobs"
    ),
    "flat, token_logprobs too": Lie(
        lambda d: [
            of_field(name, lambda v: np.full_like(v, -np.log(420)))(d)
            for name in ("topk_logprobs", "token_logprobs")
        ],
        "mass",
    ),
    "scaled": Lie(
        lambda d: [of_field(n, lambda v: v / 2)(d) for n in ("topk_logprobs", "token_logprobs")],
        "mass",
    ),
    "all scaled": Lie(
        lambda d: [
            of_field(n, lambda v: v * 2)(d)
            for n in ("topk_logprobs", "token_logprobs", "tail_logprobs")
        ],
        "mass",
    ),
    "bits instead of nats": Lie(
        of_field("topk_logprobs", lambda v: v / np.log(2)), "token_logprobs"
    ),
    "tail too large": Lie(of_field("tail_logprobs", lambda v: np.minimum(v + 1, 0)), "mass"),
    "tail too small": Lie(of_field("tail_logprobs", lambda v: v - 1), "token_logprobs mass"),
    "no tail": Lie(of_field("tail_logprobs", lambda v: v - np.inf), "token_logprobs mass"),
    "tails of other rows": Lie(rolled("tail_logprobs"), "token_logprobs mass"),
    "k cut": Lie(cut(2), "top_k"),
    "k cut and padded": Lie(of_sequences(padded), "top_k"),
    "one entry more": Lie(of_sequences(widened), "top_k"),
    "rows of two sequences swapped": Lie(swapped(*ROWS, "token_logprobs"), "token_logprobs"),
    "scores of two sequences swapped": Lie(
        swapped("text", "token_ids", "byte_ends", "marks", *ROWS, "token_logprobs"), "text"
    ),
    "ids of two sequences swapped": Lie(swapped("id"), "ids"),
    "order reversed": Lie(lambda d: d["sequences"].reverse(), "ids"),
    "another text": Lie(of_sequences(other_text), "text"),
    "last token dropped": Lie(of_sequences(without_last_token), "text"),
    "first token twice": Lie(of_sequences(with_token_again), "text"),
    "end of turn dropped": Lie(without_end, "finished"),
    "a row missing": Lie(of_field("topk_ids", lambda v: v[:-1]), "body topk_ids"),
    "a row more": Lie(of_field("token_logprobs", lambda v: [*v, -1.0]), "body token_logprobs"),
    "a sequence missing": Lie(lambda d: d["sequences"].pop(), "scores"),
    "a sequence twice": Lie(lambda d: d["sequences"].append(d["sequences"][0]), "scores"),
    "NaN entry": Lie(at("topk_logprobs", (0, 1), np.nan), "topk_logprobs"),
    "NaN token": Lie(at("token_logprobs", 0, np.nan), "token_logprobs"),
    "NaN tail": Lie(at("tail_logprobs", 0, np.nan), "tail_logprobs"),
    "infinite entry": Lie(at("topk_logprobs", (0, 0), np.inf), "topk_logprobs"),
    "positive token": Lie(at("token_logprobs", 0, 0.5), "token_logprobs"),
    "positive tail": Lie(at("tail_logprobs", 0, 0.5), "tail_logprobs"),
    "duplicate id": Lie(
        of_field("topk_ids", lambda v: np.where([[1] * 16], v[:, :1], 0)), "topk_ids"
    ),
    "id outside the vocabulary": Lie(at("topk_ids", (0, 1), 420), "token_ids"),
    "negative token id": Lie(at("token_ids", 0, -1), "token_ids"),
    "id below -1": Lie(at("topk_ids", (0, 1), -2), "topk_ids"),
    "entries unsorted": Lie(
        lambda d: [of_field(n, lambda v: v[:, ::-1])(d) for n in ("topk_ids", "topk_logprobs")],
        "topk_logprobs",
    ),
    "float16 instead of float32": Lie(
        of_field("topk_logprobs", lambda v: v.astype(np.float16).astype(np.float32)),
        "token_logprobs",
    ),
    "flipped bit": Lie(flipped_bit, "checksum"),
    "another manifest": Lie(lambda d: d.update(manifest_id="1f3a" * 8), "manifest_id"),
    "another schema version": Lie(lambda d: d.update(schema_version=1), "body"),
}


def forge_checksum(document: Document) -> None:
    """Compute the checksum of a changed document as the service does."""
    sequences = document["sequences"]
    marks = [[list(mark) for mark in sequence["marks"]] for sequence in sequences]
    names = [document["manifest_id"], [sequence["id"] for sequence in sequences], marks]
    digest = hashlib.sha256(json.dumps(names).encode())
    for name, tensor in tensors_of(document).items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape if tensor.size else 0}".encode())
        digest.update(tensor.tobytes())
    document["checksum"] = digest.hexdigest()[:32]


def tensors_of(document: Document) -> dict[str, np.ndarray]:
    """Return the tensors of the binary format, consistent or not."""
    sequences = document["sequences"]
    texts = [sequence["text"].encode() for sequence in sequences]
    lengths = [len(sequence["token_ids"]) for sequence in sequences]
    columns: dict[str, Any] = {
        "offsets": np.cumsum([0, *lengths]),
        "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
        "text_offsets": np.cumsum([0, *map(len, texts)]),
    }
    for name in _DTYPES:
        if name not in columns:
            columns[name] = np.concatenate([np.array(s[name]) for s in sequences])
    return {name: np.ascontiguousarray(columns[name], dtype=_DTYPES[name]) for name in _DTYPES}


def as_binary(document: Document) -> bytes:
    """Return the document in the binary format."""
    header = {key: document[key] for key in ("schema_version", "manifest_id", "checksum")}
    header |= {
        "ids": [sequence["id"] for sequence in document["sequences"]],
        "marks": [sequence["marks"] for sequence in document["sequences"]],
        "timings": {},
    }
    return save(tensors_of(document), metadata={"mopd": json.dumps(header)})


def as_json(document: Document) -> bytes:
    """Return the document as JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return plain(value.tolist())
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, np.generic):
            return plain(value.item())
        return None if value == -np.inf else value

    return json.dumps(plain(document)).encode()


@dataclass
class LyingProxy:
    """Settings of the proxy, changed between requests."""

    upstream: str
    lie: Callable[[Document], object] | None = None
    forged: bool = False
    """Compute the checksum of the changed response and the hash of the received request."""
    binary: bool = True
    raw: Callable[[httpx.Response], Response] | None = None
    """Replaces the response of any status instead."""
    request: Callable[[bytes], bytes] | None = None
    """Changes the body of a scoring request."""
    last_body: bytes = b""
    client: httpx.AsyncClient | None = None

    async def forward(self, request: Request) -> Response:
        """Forward a request, and change the response to a scoring request."""
        headers = {"content-type": "application/json"}
        if self.binary:
            headers["accept"] = BINARY_MEDIA_TYPE
        if self.client is None:  # in the proxy's event loop
            self.client = httpx.AsyncClient(base_url=self.upstream, timeout=60, verify=False)
        sent = await request.body()
        if sent and self.request is not None:
            sent = self.request(sent)
        true = await self.client.request(
            request.method, request.url.path, content=sent, headers=headers
        )
        kept = {
            name: value
            for name, value in true.headers.items()
            if name in ("content-type", MANIFEST_HEADER.lower(), REQUEST_HEADER.lower())
        }
        if self.forged and REQUEST_HEADER in true.headers:
            kept[REQUEST_HEADER.lower()] = body_hash(await request.body())
        if request.url.path == "/v1/logprobs" and self.raw is not None:
            return self.raw(true)
        body = true.content
        if request.url.path == "/v1/logprobs" and self.lie and true.status_code == 200:
            body = self.changed(body)
        self.last_body = true.content
        return Response(body, true.status_code, kept)

    def changed(self, body: bytes) -> bytes:
        """Return the changed body."""
        document = json.loads(encode_json(decode_binary(body)) if self.binary else body)
        for sequence in document["sequences"]:
            for name in ("topk_logprobs", "token_logprobs", "tail_logprobs"):
                values = np.array(sequence[name], dtype=np.float32)
                sequence[name] = np.where(np.isnan(values), np.float32(-np.inf), values)
        assert self.lie is not None
        self.lie(document)
        if self.forged:
            forge_checksum(document)
        return as_binary(document) if self.binary else as_json(document)


@contextmanager
def serving(app: Any) -> Generator[str]:
    """Serve an application on a free port in a thread; yield its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def proxy_app(proxy: LyingProxy) -> Starlette:
    """Return the application of a proxy."""
    return Starlette(routes=[Route("/{path:path}", proxy.forward, methods=["GET", "POST"])])
