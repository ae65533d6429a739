"""What a teacher said was wrong: reads RFC 9457 problem documents into one clause."""

import json
from typing import Any

import httpx

#: Characters of a body that is no problem document (a proxy's HTML page) that a message quotes.
_QUOTED_CHARACTERS = 200


def problem_of(response: httpx.Response) -> str:
    """The detail of a problem document; of any other body, its beginning."""
    try:
        document: Any = json.loads(response.content)
    except ValueError:
        document = None
    if isinstance(document, dict):
        said: Any = document.get("detail") or document.get("title")
        if said:
            return str(said)
    return response.text.strip()[:_QUOTED_CHARACTERS] or response.reason_phrase
