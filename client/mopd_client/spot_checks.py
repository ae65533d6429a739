"""Score parts of a few completions again, in ways that only the true distributions agree with.

A response can have other distributions than the teacher and not contradict itself. The teacher
computes row ``r`` from the tokens before it, so that it has the same distribution in any request
that begins with these tokens. Each kind of second request changes what an altered response depends
on, and is compared by ``Agreement``:

=================  ==================================  ============================================
kind               second request                      detects
=================  ==================================  ============================================
``candidate_ids``  some entries and random ids of the  exchanged and random ids, repeated rows,
                   last rows, no top-k                 entries normalized over the top-k
``last_token``     another entry as the last token,    ids that were exchanged around the sampled
                   another top-k                       token; any altered row, on stock servers too
``temperature``    half of the temperature             a temperature that is ignored, scaled entries
=================  ==================================  ============================================

All kinds also detect what was altered in some responses or by one replica: the second request goes
to another replica if there is one. A server that alters the logits of
all requests in the same way serves another model, which no request shows.

The first response of each replica is verified with all kinds on at most 64 tokens, later ones with
one kind. The choices depend on the seed and the sequence, not on the order of responses.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from http import HTTPStatus
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mopd_client.score_agreement import Agreement, Disagreement, KnownRow
from mopd_protocol.errors import ConfigError, InvalidResponseError, TeacherError, VerificationError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TokenTable

Kind = Literal["candidate_ids", "last_token", "temperature"]

#: Rows that are compared: the last ones of the second request.
_ROWS = 64
#: Candidates of a row, besides its token.
_ENTRIES, _RANDOM_IDS = 4, 3
#: Half of a lower temperature is below the lowest that services accept.
_LOWEST_TEMPERATURE = 0.02
#: A teacher that has just scored a sequence does not reject the beginning of it.
_REJECTIONS = frozenset(
    (
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    )
)

#: Sends a request, not to the given address if there is another one, and checks the response.
Send = Callable[[LogprobsRequest, str], Awaitable[LogprobsResponse]]


@dataclass(frozen=True)
class _Scored:
    """A scored sequence, and how it was requested."""

    request: LogprobsRequest
    sequence: SequenceRequest
    score: TeacherScore
    url: str
    manifest: Manifest
    known_ids: NDArray[np.int64]


class SpotChecks:
    """Verification of one teacher's scores.

    Args:
        teacher: name in error messages.
        share: probability that a sequence is verified, which bounds the share of tokens that are
            scored again; 0 turns verification off.
        seed: of all choices.

    Raises:
        ConfigError: if ``share`` is not within 0 and 1.
    """

    def __init__(self, teacher: str, *, share: float, seed: int) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(
                f"teacher {teacher!r}: verify is invalid (found {share}, expected 0 to 1)",
                key="verify",
            )
        self._teacher = teacher
        self._share = share
        self._seed = seed
        self._verified: set[str] = set()  # addresses

    async def verify(
        self,
        request: LogprobsRequest,
        response: LogprobsResponse,
        manifest: Manifest,
        table: TokenTable | None,
        send: Send,
    ) -> None:
        """Verify the first response of a replica, and few of the later sequences.

        Raises:
            VerificationError: if a second score contradicts the first; ``key`` is the kind.
            TeacherError: if the teacher is unavailable.
        """
        if not self._share:
            return
        scored = zip(request.sequences, response.scores, response.urls, strict=True)
        for sequence, score, url in scored:
            if not len(score.completion):
                continue
            generator = self._generator(sequence, score)
            is_first, is_drawn = url not in self._verified, generator.random() < self._share
            if not (is_first or is_drawn):
                continue
            self._verified.add(url)  # other calls do not wait
            known = score.topk.ids if table is None else np.flatnonzero(table.present)
            known = np.unique(known[known >= 0]).astype(np.int64)
            subject = _Scored(request, sequence, score, url, manifest, known)
            kinds: Sequence[Kind] = _kinds(manifest, request.temperature)
            rows = min(len(score.completion), _ROWS)
            if not is_first:
                kinds = [kinds[generator.integers(len(kinds))]]
                rows = int(generator.integers(len(score.completion))) + 1
            try:
                for kind in kinds:
                    await self._compare(kind, subject, rows, generator, send)
            except BaseException:
                self._verified.discard(url)
                raise

    def _generator(self, sequence: SequenceRequest, score: TeacherScore) -> np.random.Generator:
        messages = [message.model_dump() for message in sequence.messages or ()]
        prompt = (self._seed, messages, sequence.tools, sequence.prompt, sequence.prompt_token_ids)
        content = repr(prompt).encode(errors="replace") + score.token_ids.tobytes()
        return np.random.default_rng(int.from_bytes(blake2b(content, digest_size=16).digest()))

    async def _compare(
        self, kind: Kind, scored: _Scored, rows: int, generator: np.random.Generator, send: Send
    ) -> None:
        """Score the first ``rows`` tokens again."""
        request = _second_request(kind, scored, rows, generator)
        try:
            response = await send(request, scored.url)
        except TeacherError as error:
            if isinstance(error, InvalidResponseError) or error.status in _REJECTIONS:
                raise VerificationError(
                    f"teacher {self._teacher!r}: the beginning of a sequence that {scored.url} has "
                    f"scored cannot be scored again: {error}",
                    key=kind,
                ) from error
            raise
        factor = scored.request.temperature / request.temperature
        agreement = Agreement(scored.manifest.dtype, scored.request.temperature, factor)
        exact = scored.manifest.features.exact_tails
        for row in range(max(rows - _ROWS, 0), rows):
            first, second = (
                KnownRow.of(score, row, candidates[row] if candidates else None, exact_tails=exact)
                for score, candidates in (
                    (scored.score, scored.sequence.candidate_ids),
                    (response.scores[0], request.sequences[0].candidate_ids),
                )
            )
            disagreement = agreement.disagreement(row, first, second)
            if disagreement is not None:
                raise self._error(kind, disagreement, scored.url, response.urls[0])

    def _error(
        self, kind: Kind, disagreement: Disagreement, url: str, second_url: str
    ) -> VerificationError:
        return VerificationError(
            f"teacher {self._teacher!r}: two scores of one sequence contradict each other in row "
            f"{disagreement.row}, {disagreement.subject} (found {disagreement.second:.6g} nats at "
            f"{second_url} by a second request of kind {kind}, expected {disagreement.expected:.6g}"
            f" within {disagreement.tolerance:.3g} by the score of {url}). Check that these "
            "addresses serve one model without changes of requests and responses on their way, or "
            "set verify to 0.",
            key=kind,
        )


def _kinds(manifest: Manifest, temperature: float) -> list[Kind]:
    kinds: list[Kind] = ["last_token"]
    if manifest.features.candidate_ids:
        kinds.append("candidate_ids")
    if manifest.features.temperature and temperature >= _LOWEST_TEMPERATURE:
        kinds.append("temperature")
    return kinds


def _second_request(
    kind: Kind, scored: _Scored, rows: int, generator: np.random.Generator
) -> LogprobsRequest:
    token_ids: list[int] = scored.score.token_ids[:rows].tolist()
    top_k, temperature = scored.request.top_k, scored.request.temperature
    candidates: list[list[int]] | None = None
    if kind == "candidate_ids":
        start = max(rows - _ROWS, 0)
        candidates = [
            _candidates(scored, row, generator) if row >= start else [] for row in range(rows)
        ]
    elif kind == "last_token":
        others = _entries(scored, rows - 1)
        others = others[others != token_ids[-1]]
        token_ids[-1] = int(generator.choice(others if len(others) else scored.known_ids))
        top_k = int(generator.integers(1, top_k + 1))
    else:
        temperature /= 2
    changes = {
        "completion": None,
        "completion_token_ids": token_ids,
        "finished": False,
        "candidate_ids": candidates,
    }
    return scored.request.model_copy(
        update={
            "sequences": [scored.sequence.model_copy(update=changes)],
            "top_k": top_k,
            "temperature": temperature,
            "logprobs_dtype": "float32",
        }
    )


def _entries(scored: _Scored, row: int) -> NDArray[np.int32]:
    ids = scored.score.topk.ids[row]
    return ids[ids >= 0]


def _candidates(scored: _Scored, row: int, generator: np.random.Generator) -> list[int]:
    """Return the token, some of the entries and some random ids of a row, in random order."""
    entries = _entries(scored, row)
    chosen = [
        *generator.permutation(entries)[:_ENTRIES].tolist(),
        *generator.choice(scored.known_ids, _RANDOM_IDS).tolist(),
    ]
    ids = [*dict.fromkeys([int(scored.score.token_ids[row]), *chosen])]
    return generator.permutation(ids[: scored.manifest.max_top_k]).tolist()
