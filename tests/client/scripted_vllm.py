"""Stock vLLM server without a model, with the routes and JSON of vLLM 0.32 and 0.33.

Its distributions are random, normalised, and depend on all preceding tokens, or are those of
``distribution``. ``test_stock_vllm`` compares its errors with a vLLM's.
"""

import base64
import io
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
FINGERPRINT = "vllm-0.32.0-c24d2e65"
#: Tokens of one entry of the prefix cache.
BLOCK = 16


@dataclass
class ScriptedVllm:
    """Respond like the server; responses scripted for a path come first, once each."""

    tokenizer: Tokenizer
    width: int  # rows of the head
    model: str = "org/served"
    max_model_len: int = 256
    max_logprobs: int = 20
    fingerprint: str | None = FINGERPRINT
    returns_token_ids: bool = True
    scale_out: bool = False  # --enable-scale-out
    v2_runner: bool = True  # needs Triton
    distribution: Callable[[Sequence[int]], NDArray[np.floating]] | None = None
    cached: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])  # prefixes
    template: tuple[str, str] = ("<|user|>", "<|assistant|>")  # before and after a user's message
    scripts: dict[str, deque[httpx.Response]] = field(
        default_factory=dict[str, deque[httpx.Response]]
    )
    requests: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    def script(self, path: str, *responses: httpx.Response) -> None:
        """Add the next responses to requests for ``path``."""
        self.scripts.setdefault(path, deque()).extend(responses)

    def requests_to(self, path: str) -> list[Any]:
        """Return the bodies of requests for ``path``."""
        return [body for requested, body in self.requests if requested == path]

    @property
    def transport(self) -> httpx.MockTransport:
        """Network with this server only."""
        return httpx.MockTransport(self.respond)

    def respond(self, request: httpx.Request) -> httpx.Response:
        """Return the next response."""
        path = request.url.path
        body = json.loads(request.content) if request.content else None
        self.requests.append((path, body))
        if self.scripts.get(path):
            return self.scripts[path].popleft()
        routes = {
            "/health": lambda: httpx.Response(200),
            "/version": lambda: httpx.Response(200, json={"version": "0.32.0"}),
            "/v1/models": self._models,
            "/tokenize": lambda: self._tokenize(body),
            COMPLETIONS: lambda: self._complete(body),
            GENERATE: lambda: self._generate(body),
        }
        return routes[path]() if path in routes else _error(404, "Not Found")

    def row(self, before: Sequence[int]) -> NDArray[np.float64]:
        """Return log-probabilities of the token after ``before``, [width]."""
        if self.distribution is not None:
            return self.distribution(before).astype(np.float64)
        logits = np.random.default_rng([1, *before]).normal(size=self.width) * 3
        return logits - np.log(np.exp(logits).sum())

    def _models(self) -> httpx.Response:
        card = {
            "id": self.model,
            "object": "model",
            "owned_by": "vllm",
            "root": "/models/served",
            "max_model_len": self.max_model_len,
        }
        return httpx.Response(200, json={"object": "list", "data": [card]})

    def _tokenize(self, body: Any) -> httpx.Response:
        [message] = body["messages"]
        before, after = self.template
        ids = self._ids(before + message["content"] + after)
        return httpx.Response(200, json={"count": len(ids), "tokens": ids})

    def _complete(self, body: Any) -> httpx.Response:
        if body["model"] != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if body["prompt_logprobs"] > self.max_logprobs:
            return _error(
                400,
                f"Requested prompt logprobs of {body['prompt_logprobs']}, which is greater than "
                f"max allowed: {self.max_logprobs}",
            )
        prompt = body["prompt"]
        prompts = [self._ids(text) for text in prompt] if isinstance(prompt[0], str) else [prompt]
        if max(len(prompt) for prompt in prompts) >= self.max_model_len:
            return _error(400, "max_tokens must be at least 1, got 0.")
        choices = [
            {
                "index": index,
                "text": "",
                "logprobs": None,
                "finish_reason": "length",
                "prompt_logprobs": self._prompt_logprobs(prompt, body["prompt_logprobs"]),
                "prompt_token_ids": prompt
                if body.get("return_token_ids") and self.returns_token_ids
                else None,
            }
            for index, prompt in enumerate(prompts)
        ]
        return httpx.Response(
            200,
            json={
                "object": "text_completion",
                "model": self.model,
                "choices": choices,
                "system_fingerprint": self.fingerprint,
            },
        )

    def _generate(self, body: Any) -> httpx.Response:
        """Score ids as vLLM's V2 model runner; positions of the prefix cache are not computed."""
        if not self.scale_out:
            return _error(
                403,
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to "
                "enable them.",
            )
        if body["model"] != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        prompt, sampling = body["token_ids"], body["sampling_params"]
        ids, start = sampling["prompt_logprob_token_ids"], sampling["prompt_logprob_start"]
        if problem := self._problem(prompt, ids, start):
            return _error(400, problem)
        ends = [len(prompt) // BLOCK * BLOCK - BLOCK * n for n in range(len(prompt) // BLOCK)]
        hits = [end for end in ends if end < len(prompt) and tuple(prompt[:end]) in self.cached]
        self.cached |= {tuple(prompt[:end]) for end in ends}
        matrix = None
        if sampling["skip_reading_prefix_cache"] or max(hits, default=0) <= start:
            values = np.full((len(ids), max(map(len, ids))), -np.inf, dtype=np.float32)
            for row, chosen in enumerate(ids):
                distribution = self.row(prompt[: start + 1 + row])
                for column, token_id in enumerate(chosen):
                    if token_id >= 0:
                        values[row, column] = distribution[token_id]
            matrix = encoded(values)
        document = {"model": self.model, "prompt_logprobs": None, "choices": []}
        return httpx.Response(200, json={**document, "prompt_token_id_logprobs": matrix})

    def _problem(self, prompt: list[int], ids: list[list[int]], start: int) -> str | None:
        width, rows = max(map(len, ids), default=0), len(prompt) - 1 - start
        highest = max((token_id for row in ids for token_id in row), default=0)
        if not self.v2_runner:
            return (
                "prompt_logprob_token_ids requires the V2 model runner "
                "(VLLM_USE_V2_MODEL_RUNNER=1). (parameter=prompt_logprob_token_ids)"
            )
        if not width:
            return (
                "prompt_logprob_token_ids must be a non-empty integer array of shape "
                "[num_rows, num_ids]. (parameter=prompt_logprob_token_ids, value=list)"
            )
        if width > self.max_logprobs:
            return (
                f"Requested {width} token ids per row in prompt_logprob_token_ids, which is "
                f"greater than max allowed: {self.max_logprobs}. Set max_logprobs "
                f"(--max-logprobs) to at least {width}. "
                f"(parameter=prompt_logprob_token_ids, value={width})"
            )
        if highest >= self.width:
            return (
                "prompt_logprob_token_ids contain out-of-vocab token ids (-1 pads a row). "
                f"Vocabulary size: {self.width}"
            )
        if len(ids) != rows:
            return (
                f"prompt_logprob_token_ids has {len(ids)} rows, but the prompt has {rows} scored "
                "rows (prompt_len - 1 - prompt_logprob_start). "
                f"(parameter=prompt_logprob_token_ids, value={len(ids)})"
            )
        return None

    def _prompt_logprobs(self, prompt: Sequence[int], k: int) -> list[Any]:
        """Return the prompt's token and the k most likely, without duplicates, per position."""
        entries: list[Any] = [None]
        for position in range(1, len(prompt)):
            row = self.row(prompt[:position])
            ranked = np.argsort(-row, kind="stable")
            own = prompt[position]
            entries.append(
                {
                    str(token): {
                        "logprob": float(np.float32(row[token])),
                        "rank": int(np.flatnonzero(ranked == token)[0]) + 1,
                        "decoded_token": "",
                    }
                    for token in dict.fromkeys([own, *ranked[:k].tolist()])
                }
            )
        return entries

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def encoded(matrix: NDArray[Any]) -> str:
    """Return the field of a response with these log-probabilities."""
    file = io.BytesIO()
    np.save(file, matrix)
    return base64.b64encode(file.getvalue()).decode()


def _error(status: int, message: str) -> httpx.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return httpx.Response(status, json={"error": error})
