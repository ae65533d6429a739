"""``SyncTeacherClient``: a teacher client for scripts and notebooks, without ``await``."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from pydantic import ValidationError

from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import ClientOptions, TeacherClient
from mopd_client.transport.background_loop import BackgroundLoop
from mopd_protocol.errors import ConfigError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import ControlToken, LogprobsDtype, SequenceRequest
from mopd_protocol.samples import Message, TeacherScore


class SyncTeacherClient:
    """Synchronous ``TeacherClient`` of one teacher.

    The client runs in an event loop on a background thread, so a running event loop (a notebook's)
    does not interfere. Connections are closed by ``close``, by leaving a ``with`` block, or when
    the object is garbage-collected.

    Args:
        url: address of the teacher, or the addresses of its replicas.
        name: name of the teacher in error messages.
        options: options of ``TeacherClient``.

    Raises:
        ConfigError: on an invalid address or option.
    """

    def __init__(
        self, url: str | Sequence[str], *, name: str = "teacher", **options: Unpack[ClientOptions]
    ) -> None:
        self._client = TeacherClient(name, [url] if isinstance(url, str) else url, **options)
        self._loop = BackgroundLoop(f"teacher {name}", self._client.aclose)

    def wait_until_ready(self, deadline_seconds: float) -> None:
        """Wait until every replica is ready to score.

        Raises:
            TeacherError: if a replica is not ready within ``deadline_seconds``.
        """
        self._loop.run(self._client.wait_until_ready(deadline_seconds))

    def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Return the teacher's manifest; see ``TeacherClient.handshake``."""
        return self._loop.run(self._client.handshake(expectation))

    def tokenizer(self) -> TeacherTokenizer:
        """Return the teacher's tokenizer; see ``TeacherClient.tokenizer``."""
        return self._loop.run(self._client.tokenizer())

    def score(
        self,
        *,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        completion: str | Sequence[str | ControlToken] | None = None,
        completion_token_ids: Sequence[int] | None = None,
        finished: bool = False,
        top_k: int = 1,
        temperature: float = 1.0,
    ) -> TeacherScore:
        """Score one completion: its ``token_ids``, ``logprobs`` and ``topk`` under the teacher.

        Args:
            messages: the conversation, rendered with the teacher's chat template.
            tools: JSON schemas of tools, shown by the chat template.
            prompt: plain text in place of ``messages``.
            completion: text, or a list of texts and control tokens.
            completion_token_ids: the teacher's token ids in place of ``completion``.
            finished: append the teacher's end-of-turn token and score it.
            top_k: most likely tokens to return per completion token.
            temperature: softmax temperature of the returned distributions.

        Raises:
            ConfigError: on invalid arguments.
            TeacherError: if the teacher is unavailable, rejects the request, or returns an invalid
                response.
        """
        fields = {
            "messages": messages,
            "tools": tools,
            "prompt": prompt,
            "completion": completion,
            "completion_token_ids": completion_token_ids,
            "finished": finished,
        }
        try:
            sequence = SequenceRequest.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"invalid scoring request: {error}") from error
        [score] = self.score_batch([sequence], top_k=top_k, temperature=temperature)
        return score

    def score_batch(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """Score several completions in one request; see ``TeacherClient.score``."""
        return self._loop.run(
            self._client.score(
                sequences, top_k=top_k, temperature=temperature, logprobs_dtype=logprobs_dtype
            )
        )

    def close(self) -> None:
        """Close the connections and stop the thread; a second call has no effect."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
