"""``PromptRoute``: the two ways in which a stock vLLM server tells the logprobs of a prompt.

``/v1/completions`` is always there. ``/inference/v1/generate`` (tokens in, tokens out) is opened by
``vllm serve --enable-scale-out``: it gives the same numbers, and can be asked not to write every
entry out as text, which takes the server longer than all else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

Api = Literal["auto", "completions", "generate"]

#: How a server answers that has not opened a route, or is too old to have it.
NOT_OPEN = frozenset(
    {
        HTTPStatus.FORBIDDEN,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.NOT_IMPLEMENTED,
    }
)


@dataclass(frozen=True)
class PromptRoute:
    """A path, what is sent there, and where the answer stands."""

    path: str
    names_server: bool
    """Every answer says which server gave it (``system_fingerprint``), not only the model."""

    def body(self, model: str, token_ids: Sequence[int], top_k: int) -> dict[str, Any]:
        """The question for the ``top_k`` most likely tokens at each of ``token_ids``."""
        sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
        if self is COMPLETIONS:
            return {"model": model, "prompt": list(token_ids), **sampling}
        return {
            "model": model,
            "token_ids": list(token_ids),
            "sampling_params": {**sampling, "detokenize": False},
        }

    def prompt_logprobs(self, document: dict[str, Any]) -> Any:
        """What an answer to ``body`` tells, as the server wrote it.

        Raises:
            KeyError, TypeError, ValueError: when it is no such answer.
        """
        if self is GENERATE:
            return document["prompt_logprobs"]
        [choice] = document["choices"]
        return choice["prompt_logprobs"]


COMPLETIONS = PromptRoute("/v1/completions", names_server=True)
GENERATE = PromptRoute("/inference/v1/generate", names_server=False)
