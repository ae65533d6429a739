"""``OpenAIService``: a teacher that runs a stock ``vllm serve``.

Such a server takes token ids and returns ``prompt_logprobs``; everything else that a mopd service
does happens here: tokens, templates, the manifest. It can therefore neither score chosen ids nor
another temperature, and what it serves is known only by its name and its version.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Coroutine, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import httpx

from mopd_client.services.expectation import Expectation
from mopd_client.services.vllm_logprobs import topk_of_prompt_logprobs
from mopd_client.services.vllm_routes import COMPLETIONS, GENERATE, NOT_OPEN, Api, PromptRoute
from mopd_client.tokenizers.folder import FolderTokenizer, read_folder_tokenizer
from mopd_client.tokenizers.sequence_tokens import SequenceTokens, require_room, sequence_tokens
from mopd_client.tokenizers.teacher import TeacherTokenizer
from mopd_client.transport.connection import Connection
from mopd_client.transport.outcome import problem_of
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import ConfigError, DataError, TeacherError
from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KIND = "vLLM server"

#: Texts on which two tokenizers of one family disagree: bytes of all kinds, numbers, spaces.
PROBES = (
    "The 12 quick brown foxes cost 1999.50, don't they? ",
    "def add(a, b):\n    return a + b\r\n\n\tx\u00a0y",
    "Grüße, où, привет, γειά, 的漢字かな, 안녕하세요, שלום, नमस्ते, สวัสดี",
    "🙂 👨\u200d👩\u200d👧 ∑≤—…¿ \u0301e\u0301 \x00\x1b\u2028",
)
_QUESTION = ({"role": "user", "content": "3 + 4 ="},)


class OpenAIService:
    """See ``Service``.

    Args:
        tokenizer: a folder, or a hub id, with the tokenizer of the served model.
        model: the name under which the server knows the model; not needed where it serves one.
        revision: what the caller calls these weights; the server does not tell.
        api: ``auto`` asks through ``/inference/v1/generate`` where every replica has opened it,
            which is faster, else through ``/v1/completions``; the others ask in one way only.
    """

    ready_path = "/health"

    def __init__(
        self,
        tokenizer: str,
        *,
        model: str | None = None,
        revision: str | None = None,
        api: Api = "auto",
    ) -> None:
        self._source = tokenizer
        self._model = model
        self._revision = revision
        self._api: Api = api
        self._route = COMPLETIONS if api == "completions" else GENERATE
        self._tokenizer: FolderTokenizer | None = None
        self._loading = asyncio.Lock()
        self._top_k = 1  # the largest that a server has agreed to
        self._manifests: dict[str | None, Manifest] = {}  # by the server's own fingerprint

    @property
    def path(self) -> str:
        """Where sequences are asked for, once a handshake has shown what is open."""
        return self._route.path

    async def manifest(
        self,
        connection: Connection,
        replica: Replica,
        expectation: Expectation | None,
        *,
        deadline_seconds: float | None,
    ) -> Manifest:
        """See ``Service``; made here, of what the server tells and of the tokenizer's files.

        A probe shows that the server's tokenizer is this one, and that it takes this ``top_k``.
        """
        tokenizer = await self._folder_tokenizer()
        asker = _Asker(connection, replica, deadline_seconds)
        card = _card(connection.teacher, await asker.get("/v1/models"), self._model)
        version = str((await asker.get("/version")).get("version", "unknown"))
        top_k = max(self._top_k, 1 if expectation is None else expectation.top_k)
        fingerprint = await self._probe(asker, card["id"], tokenizer, top_k)
        await self._compare_templates(asker, card["id"], tokenizer)
        await self._choose_route(asker, card["id"], tokenizer, top_k)
        self._top_k = top_k
        manifest = Manifest(
            service=connection.teacher,
            model=str(card["id"]),
            revision=self._revision or "unknown",
            engine="vllm serve",
            engine_version=f"{version} {fingerprint}" if fingerprint else version,
            dtype="unknown",
            logit_width=tokenizer.table.size,
            tokenizer_fingerprint=tokenizer.table.fingerprint,
            tokenizer_size=tokenizer.table.size,
            roles=tokenizer.table.roles,
            chat_template_hash=tokenizer.chat_template_hash,
            max_model_len=int(card["max_model_len"]) - 1,  # it always writes one token itself
            max_top_k=top_k,
            features=Features(
                candidate_ids=False, temperature=False, messages=tokenizer.template is not None
            ),
        )
        self._manifests[fingerprint] = manifest
        return manifest

    async def tokenizer(self, connection: Connection, manifest: Manifest) -> TeacherTokenizer:
        """See ``Service``; the one that was read from files."""
        folder = await self._folder_tokenizer()
        return TeacherTokenizer(folder.tokenizer, folder.table, folder.encoder)

    async def score(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """See ``Service``; one question a sequence, all at once."""
        _require_plain(connection.teacher, request)
        tokenizer = await self._folder_tokenizer()
        teacher = connection.teacher
        tokens = [sequence_tokens(teacher, tokenizer, sequence) for sequence in request.sequences]
        for sequence in tokens:
            require_room(teacher, sequence, manifest)
        answers = await _all_or_none(
            [self._ask(connection, t, request.top_k, manifest) for t in tokens]
        )
        others = [manifest_id for manifest_id, _ in answers if manifest_id != manifest.manifest_id]
        return LogprobsResponse(
            manifest_id=others[0] if others else manifest.manifest_id,
            ids=tuple(sequence.id for sequence in request.sequences),
            scores=tuple(score for _, score in answers),
        )

    async def _folder_tokenizer(self) -> FolderTokenizer:
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(
                    read_folder_tokenizer, self._source, self._revision
                )
        return self._tokenizer

    async def _probe(
        self, asker: "_Asker", model: str, tokenizer: FolderTokenizer, top_k: int
    ) -> str | None:
        """The fingerprint that the server gives itself, once it has read the probes as we do."""
        teacher, url = asker.connection.teacher, asker.replica.url
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(PROBES),
            "add_special_tokens": False,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top_k,
            "return_token_ids": True,
        }
        response = await asker.post(COMPLETIONS.path, body)
        if response.status_code == HTTPStatus.BAD_REQUEST:
            raise ConfigError(
                f"teacher {teacher!r} at {url} refuses prompt_logprobs of {top_k}: "
                f"{problem_of(response)}; start it with --max-logprobs {top_k} or more, or lower "
                "top_k"
            )
        document = asker.document(response)
        told = [choice.get("prompt_token_ids") for choice in _choices(teacher, document)]
        found = [list[int](ids) for ids in told if ids is not None]
        if len(found) != len(PROBES):
            raise ConfigError(
                f"teacher {teacher!r} at {url} does not tell how it tokenizes "
                "(return_token_ids), so its tokenizer cannot be checked; run a newer vLLM"
            )
        for text, theirs in zip(PROBES, found, strict=True):
            ours = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
            if ours != theirs:
                at = _first_difference(ours, theirs)
                raise DataError(
                    f"teacher {teacher!r} at {url} has another tokenizer than {self._source!r}: "
                    f"of {text!r} it makes {theirs[at : at + 4]} from token {at} on, expected "
                    f"{ours[at : at + 4]}; give the tokenizer of the served model"
                )
        return document.get("system_fingerprint")

    async def _compare_templates(
        self, asker: "_Asker", model: str, tokenizer: FolderTokenizer
    ) -> None:
        """Warns where the server would render messages otherwise; it may have its reasons."""
        if tokenizer.template is None:
            return
        response = await asker.post("/tokenize", {"model": model, "messages": list(_QUESTION)})
        if response.status_code != HTTPStatus.OK:
            return  # not every server has this route, and nothing needs it
        rendered = tokenizer.template.render(_QUESTION, add_generation_prompt=True)
        ours = tokenizer.tokenizer.encode(rendered, add_special_tokens=False).ids
        if asker.document(response).get("tokens") != ours:
            logger.warning(
                "teacher %r at %s renders messages with another chat template than %r, which is "
                "used; was it started with --chat-template?",
                asker.connection.teacher,
                asker.replica.url,
                self._source,
            )

    async def _choose_route(
        self, asker: "_Asker", model: str, tokenizer: FolderTokenizer, top_k: int
    ) -> None:
        """Tries ``/inference/v1/generate``, unless it is known that it is not to be used."""
        if self._route is not GENERATE:
            return
        token_ids = tokenizer.tokenizer.encode(PROBES[0], add_special_tokens=False).ids
        response = await asker.post(GENERATE.path, GENERATE.body(model, token_ids, top_k))
        if response.status_code in NOT_OPEN:
            found = problem_of(response)
        elif _tells_prompt(asker.document(response), model, len(token_ids)):
            return
        else:
            found = "its answer holds no prompt_logprobs of this model"
        if self._api == "generate":
            raise ConfigError(
                f"teacher {asker.connection.teacher!r} at {asker.replica.url} cannot be asked "
                f"through {GENERATE.path}: {found}; start vLLM 0.32 or newer with "
                "--enable-scale-out, or set api to auto"
            )
        self._route = COMPLETIONS

    async def _ask(
        self, connection: Connection, tokens: SequenceTokens, top_k: int, manifest: Manifest
    ) -> tuple[str, TeacherScore]:
        """The manifest id of whoever answered, and the score."""
        token_ids = tokens.token_ids
        route, response = await self._respond(connection, manifest.model, token_ids, top_k)
        # Megabytes of JSON, which other questions should not wait for.
        document = await asyncio.to_thread(connection.json_object, response, kind=_KIND)
        tokenizer = await self._folder_tokenizer()
        try:
            topk = await asyncio.to_thread(
                topk_of_prompt_logprobs,
                route.prompt_logprobs(document),
                token_ids,
                first=len(tokens.prompt_ids),
                k=top_k,
                known=tokenizer.table.present,
            )
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise TeacherError(
                f"teacher {connection.teacher!r} answered nonsense: {error}",
                status=response.status_code,
            ) from error
        manifest_id = self._manifest_id(document, route, manifest)
        return manifest_id, TeacherScore(manifest_id, tokens.completion, topk)

    async def _respond(
        self, connection: Connection, model: str, token_ids: Sequence[int], top_k: int
    ) -> tuple[PromptRoute, httpx.Response]:
        """The answer of a server, and how it was asked."""
        route = self._route
        try:
            body = json.dumps(route.body(model, token_ids, top_k)).encode()
            return route, await connection.post(route.path, body)
        except TeacherError as error:
            if route is COMPLETIONS or self._api == "generate" or error.status not in NOT_OPEN:
                raise
        # A replica that was not there at the handshake, or came back without the option.
        self._route = COMPLETIONS
        body = json.dumps(COMPLETIONS.body(model, token_ids, top_k)).encode()
        return COMPLETIONS, await connection.post(COMPLETIONS.path, body)

    def _manifest_id(self, document: dict[str, Any], route: PromptRoute, manifest: Manifest) -> str:
        """Of the server that answered, by what it says of itself with every answer."""
        if not route.names_server and document.get("model") == manifest.model:
            return manifest.manifest_id
        same = self._manifests.get(document.get("system_fingerprint"))
        if same is not None and document.get("model") == same.model:
            return same.manifest_id
        now = {
            "model": str(document.get("model")),
            "engine_version": str(document.get("system_fingerprint")),
        }
        return manifest.model_copy(update=now).manifest_id


class _Asker:
    """Questions of a handshake, to one replica."""

    def __init__(
        self, connection: Connection, replica: Replica, deadline_seconds: float | None
    ) -> None:
        self.connection = connection
        self.replica = replica
        self._deadline_seconds = deadline_seconds

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path."""
        response = await self.connection.send_to_replica(
            self.replica, path, deadline_seconds=self._deadline_seconds
        )
        return self.document(response)

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer, 200 or not."""
        return await self.connection.send_to_replica(
            self.replica, path, body=body, deadline_seconds=self._deadline_seconds
        )

    def document(self, response: httpx.Response) -> dict[str, Any]:
        """The JSON object of an answer that must be one."""
        return self.connection.json_object(self.connection.require_ok(response), kind=_KIND)


def _card(teacher: str, models: dict[str, Any], wanted: str | None) -> dict[str, Any]:
    """The server's entry of the model that is asked."""
    try:
        cards = {str(card["id"]): card for card in models["data"]}
        wanted = next(iter(cards)) if wanted is None and len(cards) == 1 else wanted
        if wanted in cards and int(cards[wanted]["max_model_len"]) > 1:
            return cards[wanted]
    except (KeyError, TypeError, ValueError) as error:
        raise TeacherError(
            f"teacher {teacher!r} lists no models with a max_model_len ({error!r}); is this "
            f"address a {_KIND}?",
            status=HTTPStatus.OK,
        ) from error
    asked = "one model and no name was given" if wanted is None else f"{wanted!r}"
    raise ConfigError(
        f"teacher {teacher!r} serves {', '.join(sorted(cards)) or 'nothing'}, expected {asked}; "
        "set the teacher's model to a name that it serves"
    )


def _choices(teacher: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """What was answered, in the order of what was asked."""
    try:
        return sorted(document["choices"], key=lambda choice: choice["index"])
    except (KeyError, TypeError) as error:
        raise TeacherError(
            f"teacher {teacher!r} answered nonsense: no choices ({error!r})", status=HTTPStatus.OK
        ) from error


def _tells_prompt(document: dict[str, Any], model: str, tokens: int) -> bool:
    """Whether an answer of ``GENERATE`` is one: older servers leave out what they do not know."""
    told: Any = document.get("prompt_logprobs")
    return document.get("model") == model and isinstance(told, list) and len(told) == tokens


def _require_plain(teacher: str, request: LogprobsRequest) -> None:
    """Raises TeacherError for what such a server cannot do."""
    chosen = any(sequence.candidate_ids is not None for sequence in request.sequences)
    if request.temperature != 1.0 or chosen:
        what = "candidate_ids" if chosen else f"temperature {request.temperature:g}"
        raise TeacherError(
            f"teacher {teacher!r} is a {_KIND}, which cannot score {what}; serve it with "
            "mopd-teacher, or do without",
            status=HTTPStatus.BAD_REQUEST,
        )


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return sum(1 for _ in equal)


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result; at the first error the other calls are cancelled."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
