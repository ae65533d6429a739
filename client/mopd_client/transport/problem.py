"""What a teacher said was wrong: reads an error's document into one clause."""

import json
from typing import Any

import httpx

#: Characters of a body that is no problem document (a proxy's HTML page) that a message quotes.
_QUOTED_CHARACTERS = 200


def problem_of(response: httpx.Response) -> str:
    """The detail of a problem document, the message of an OpenAI error; else the beginning."""
    try:
        document: Any = json.loads(response.content)
    except ValueError:
        document = None
    if isinstance(document, dict):
        error: Any = document.get("error")
        message: Any = error.get("message") if isinstance(error, dict) else None
        said: Any = document.get("detail") or document.get("title") or message
        if said:
            return str(said)
    return response.text.strip()[:_QUOTED_CHARACTERS] or response.reason_phrase
