"""A stock vLLM server without a model: its routes and its JSON, as vLLM 0.32 was seen to answer.

Its distributions are made up, but are distributions, and depend on everything before a token.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
FINGERPRINT = "vllm-0.32.0-c24d2e65"


@dataclass
class ScriptedVllm:
    """Answers as the server does, but for what is scripted for a path: that comes first."""

    tokenizer: Tokenizer
    width: int  # rows of the head
    model: str = "org/served"
    max_model_len: int = 256
    max_logprobs: int = 20
    fingerprint: str | None = FINGERPRINT
    tells_token_ids: bool = True
    scale_out: bool = False
    """Started with ``--enable-scale-out``."""
    template: tuple[str, str] = ("<|user|>", "<|assistant|>")  # around a user's message
    scripts: dict[str, deque[httpx.Response]] = field(
        default_factory=dict[str, deque[httpx.Response]]
    )
    requests: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    def script(self, path: str, *answers: httpx.Response) -> None:
        """The next answers to requests for ``path``."""
        self.scripts.setdefault(path, deque()).extend(answers)

    def requests_to(self, path: str) -> list[Any]:
        """Bodies of requests for ``path``."""
        return [body for requested, body in self.requests if requested == path]

    @property
    def transport(self) -> httpx.MockTransport:
        """A network with nothing but this server."""
        return httpx.MockTransport(self.respond)

    def respond(self, request: httpx.Request) -> httpx.Response:
        """The next answer."""
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
        """[width] log-probabilities of the token after ``before``."""
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
        given = body["prompt"]
        prompts = [self._ids(text) for text in given] if isinstance(given[0], str) else [given]
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
                if body.get("return_token_ids") and self.tells_token_ids
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
        if not self.scale_out:
            return _error(
                403,
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to "
                "enable them.",
            )
        sampling = body["sampling_params"]
        asked = {**sampling, "model": body["model"], "prompt": body["token_ids"]}
        answer = self._complete(asked)
        if answer.status_code != 200:
            return answer
        [choice] = json.loads(answer.content)["choices"]
        told: list[Any] = choice["prompt_logprobs"]
        for entry in told[1:] if not sampling["detokenize"] else []:
            for candidate in entry.values():
                candidate["decoded_token"] = None
        return httpx.Response(
            200,
            json={
                "request_id": "generate-tokens-0",
                "model": self.model,
                "prompt_logprobs": told,
                "output_mode": "tokens",
                "choices": [{"index": 0, "finish_reason": "length", "token_ids": [0]}],
            },
        )

    def _prompt_logprobs(self, prompt: Sequence[int], k: int) -> list[Any]:
        """The prompt's own token first, then the k most likely; one entry where it is both."""
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


def _error(status: int, message: str) -> httpx.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return httpx.Response(status, json={"error": error})
