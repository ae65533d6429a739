"""Score one completion with one teacher."""

from collections.abc import Mapping, Sequence
from typing import Any

from mopd_client import SyncTeacherClient
from mopd_protocol import Message, TeacherScore


def score(
    url: str | Sequence[str],
    *,
    messages: Sequence[Message | Mapping[str, Any]] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompt: str | None = None,
    completion: str,
    finished: bool = False,
    top_k: int = 1,
    temperature: float = 1.0,
    api_key: str | None = None,
) -> TeacherScore:
    """Score one completion with the teacher at ``url`` and close the connection.

    The arguments and errors are those of ``SyncTeacherClient.score``; use a ``TeacherClient`` to
    score several completions.
    """
    with SyncTeacherClient(url, api_key=api_key) as teacher:
        return teacher.score(
            messages=messages,
            tools=tools,
            prompt=prompt,
            completion=completion,
            finished=finished,
            top_k=top_k,
            temperature=temperature,
        )
