"""``RemoteEngine``: a teacher at another address as the engine of a service."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from mopd_client.services.expectation import Expectation
from mopd_client.services.vllm import VllmService
from mopd_client.teacher_client import ClientOptions, TeacherClient
from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_client.tokenizers.teacher import DownloadedTokenizer
from mopd_client.transport.background_loop import BackgroundLoop
from mopd_protocol.errors import ConfigError, DataError, TeacherError, TeacherUnavailableError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import RequestTokenizer, TeacherTokenizer
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import (
    AsyncEngine,
    EngineCrashError,
    EngineDescription,
    EngineTimes,
    ScoringTask,
    empty_scores,
)
from mopd_server.scoring.tokenizer_loading import ServedTokenizer
from mopd_server.service_error import ServiceError
from mopd_server.settings import GatewaySettings


class RemoteEngine(AsyncEngine):
    """Scores with a ``TeacherClient``, in a separate event loop.

    Args:
        settings: address of the teacher.
        top_k: largest ``top_k`` of a request.
        options: of the client, for tests.

    Raises:
        MopdError: if the teacher is not ready in time, or cannot be used.
    """

    def __init__(
        self, settings: GatewaySettings, *, top_k: int, options: ClientOptions | None = None
    ) -> None:
        self._client: TeacherClient | None = None
        self._loop = BackgroundLoop("teacher", self._close_client)
        self._crashed: list[str] = []
        self._on_crash: Callable[[str], None] | None = None
        try:
            self._client = client = self._loop.run(_create(settings, options or {}))
            self._loop.run(client.wait_until_ready(settings.teacher_wait_seconds))
            expectation = Expectation(top_k=top_k, messages=True)
            self.manifest: Manifest = self._loop.run(client.handshake(expectation))
            tokenizer = self._loop.run(client.tokenizer())
            self.tokenizer = _served(tokenizer, self.manifest)
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> EngineDescription:
        """The facts of the teacher's manifest."""
        facts = self.manifest
        return EngineDescription(
            engine=facts.engine,
            engine_version=facts.engine_version,
            model=facts.model,
            revision=facts.revision,
            dtype=facts.dtype,
            logit_width=facts.logit_width,
            max_model_len=facts.max_model_len,
            candidate_ids=False,
            temperature=False,
            exact_tails=facts.features.exact_tails,
        )

    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        """See ``AsyncEngine.score``.

        Raises:
            EngineCrashError: if the teacher has changed.
            ServiceError: 503 if the teacher is unavailable; its status if it rejects the sequence.
        """
        if not len(task.completion_ids):
            return empty_scores(top_k), EngineTimes(0.0, 0.0)
        sequence = SequenceRequest(
            prompt_token_ids=task.prompt_ids.tolist(),
            completion_token_ids=task.completion_ids.tolist(),
        )
        started = time.monotonic()
        assert self._client is not None
        call = self._client.score([sequence], top_k=top_k, temperature=temperature)
        try:
            [score] = await asyncio.wrap_future(self._loop.submit(call))
        except TeacherUnavailableError as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise ServiceError(
                status, f"teacher unavailable: {error}", retry_after_seconds=5
            ) from error
        except TeacherError as error:
            rejected = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            if error.status is not None and error.status in rejected:
                raise ServiceError(error.status, str(error), key=error.key) from error
            raise
        except DataError as error:
            self._crash(str(error))
            raise EngineCrashError(str(error)) from error
        return score.topk, EngineTimes(0.0, time.monotonic() - started)

    def on_crash(self, callback: Callable[[str], None]) -> None:
        """See ``AsyncEngine.on_crash``: the teacher has changed since the start."""
        self._on_crash = callback
        for cause in self._crashed:
            callback(cause)

    def close(self) -> None:
        """Close the connections."""
        self._loop.close()

    def _crash(self, cause: str) -> None:
        if not self._crashed:
            self._crashed.append(cause)
            if self._on_crash is not None:
                self._on_crash(cause)

    async def _close_client(self) -> None:
        if self._client is not None:
            await self._client.aclose()


async def _create(settings: GatewaySettings, options: ClientOptions) -> TeacherClient:
    """Create the client in its event loop."""
    key = settings.teacher_key_file and _key(settings.teacher_key_file)
    defaults: ClientOptions = {
        "api_key": key or None,
        "timeout_seconds": settings.teacher_timeout_seconds,
        "deadline_seconds": 2 * settings.teacher_timeout_seconds,
        "max_concurrency": settings.max_concurrency,
        "service": None,
    }
    if settings.teacher_kind == "vllm":
        if settings.tokenizer is None:
            raise ConfigError(
                "--tokenizer: required for a vLLM server, whose tokenizer is loaded here",
                key="tokenizer",
            )
        defaults["service"] = VllmService(settings.tokenizer)
    return TeacherClient(settings.name or "teacher", [settings.teacher], **(defaults | options))


def _key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"--teacher-key-file {path}: cannot be read: {error}", key="teacher_key_file"
        ) from error


def _served(tokenizer: TeacherTokenizer, manifest: Manifest) -> ServedTokenizer:
    """Return the teacher's tokenizer with its chat template."""
    ends = manifest.roles.other_ends
    if isinstance(tokenizer, RequestTokenizer):
        return ServedTokenizer.of(tokenizer.chat, ends)
    assert isinstance(tokenizer, DownloadedTokenizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {**tokenizer.files, "tokenizer.json": tokenizer.tokenizer.to_str()}
        for file, text in files.items():
            path = folder / file
            # The names are the teacher's.
            if folder not in path.resolve().parents:
                raise ConfigError(
                    f"teacher: invalid name of a tokenizer file (found {file!r})", key="files"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return ServedTokenizer.of(load_tokenizer(name).chat, ends)
