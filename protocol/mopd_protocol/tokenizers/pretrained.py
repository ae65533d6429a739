"""Tokenizers of transformers, as their ``tokenizer.json`` defines them.

For several model types, ``AutoTokenizer`` replaces steps of the file (pre-tokenizer, normalizer) by
those of a Python class, so that a text becomes other tokens than the model was trained on.
``load_exact`` loads the tokenizer of the file; ``save_exact`` saves a folder that ``AutoTokenizer``
(and so vLLM) reloads as the same tokenizer.
"""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_STEPS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
#: Numbers, spaces, decomposed characters and several scripts, which families encode differently.
_TEXT = "1234567 don't  \n\t nai\u0308ve , 漢字 🙂 "
#: Settings in other files that change prompts and batches.
_SETTINGS = ("special_tokens_map", "chat_template", "padding_side")

_GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
_MODULE = "exact_tokenizer"
_CLASS = '''"""The tokenizer of tokenizer.json, with trust_remote_code.

transformers replaces the class in tokenizer_config.json by that of the model type, unless that file
names code in the folder, whether or not that code is trusted.
"""

from transformers import PreTrainedTokenizerFast


class ExactTokenizerFast(PreTrainedTokenizerFast):
    """Keep every step of tokenizer.json."""
'''
#: Settings and further files that are tried in this order until a folder reloads right.
_FORMS: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (
    ({}, {}),
    (_GENERIC, {}),
    (
        {**_GENERIC, "auto_map": {"AutoTokenizer": [None, f"{_MODULE}.ExactTokenizerFast"]}},
        {f"{_MODULE}.py": _CLASS},
    ),
)


def load_exact(
    automatic: Callable[..., Any],
    from_file: Callable[..., Any],
    model: str,
    *,
    revision: str | None = None,
    **options: Any,
) -> Any:
    """Load a tokenizer; one whose steps differ from its ``tokenizer.json`` is loaded from the file.

    Args:
        automatic: ``AutoTokenizer.from_pretrained``, which also loads slow tokenizers.
        from_file: ``PreTrainedTokenizerFast.from_pretrained``.
        model: folder or hub id.
        revision: hub commit, branch or tag.
        options: further arguments of ``automatic``.
    """
    tokenizer = automatic(model, revision=revision, **options)
    folder = Path(model).expanduser()
    if not tokenizer.is_fast or (folder.is_dir() and not (folder / _FILE).is_file()):
        return tokenizer
    try:
        exact = from_file(model, revision=revision, padding_side=tokenizer.padding_side)
    except (OSError, ValueError):
        if folder.is_dir():
            raise
        return tokenizer  # a hub model without the file, converted by transformers
    changed = _changed_steps(tokenizer, exact)
    if not changed:
        return tokenizer
    other = _encoding_difference(tokenizer, exact, [_TEXT])
    logger.log(
        logging.WARNING if other else logging.INFO,
        "tokenizer of %s: loaded from its tokenizer.json, because %s of transformers changes %s%s",
        model,
        type(tokenizer).__name__,
        ", ".join(changed),
        f" and encodes {other}" if other else "",
    )
    return exact


def save_exact(tokenizer: Any, folder: Path, automatic: Callable[..., Any]) -> list[str]:
    """Save a fast tokenizer so that ``automatic`` reloads the same one, and reload it.

    Where the files of transformers reload as another tokenizer, ``tokenizer_config.json`` is given
    the class that loads ``tokenizer.json``.

    Args:
        tokenizer: tokenizer of transformers.
        folder: folder of the model, whose ``config.json`` (if any) is saved already.
        automatic: ``AutoTokenizer.from_pretrained``.

    Returns:
        See ``reload_differences``; empty unless the tokenizer reloads as another one in every form.
    """
    tokenizer.save_pretrained(folder)
    path = folder / _CONFIG
    published = json.loads(path.read_text(encoding="utf-8"))
    named_code = None if _has_own_code(tokenizer) else published.pop("auto_map", None)
    differences: list[str] = []
    for settings, files in _FORMS:
        if settings or named_code:  # code that was not loaded is not saved either
            edited = json.dumps(published | settings, indent=2, sort_keys=True, ensure_ascii=False)
            path.write_text(edited + "\n", encoding="utf-8")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        differences = reload_differences(tokenizer, automatic, folder)
        if not differences:
            break
    return differences


def reload_differences(tokenizer: Any, automatic: Callable[..., Any], folder: Path) -> list[str]:
    """Return what differs between a saved tokenizer and the one that ``automatic`` loads.

    Args:
        tokenizer: fast tokenizer of transformers.
        automatic: ``AutoTokenizer.from_pretrained``.
        folder: folder of the saved tokenizer.

    Returns:
        Names of steps of ``tokenizer.json`` and of settings, or the error of loading; empty for the
        same tokenizer.
    """
    try:  # the model's own code was loaded because it is trusted
        loaded = automatic(str(folder), trust_remote_code=_has_own_code(tokenizer))
    except Exception as error:  # the tokenizers library raises the base class
        return [f"loading fails: {_first_line(error)}"]
    if not loaded.is_fast:
        return [_FILE]
    return _changed_steps(loaded, tokenizer) + [
        name for name in _SETTINGS if getattr(loaded, name) != getattr(tokenizer, name)
    ]


def encoding_difference(
    tokenizer: Any,
    automatic: Callable[..., Any],
    model: str,
    texts: Iterable[str] = (),
    **options: Any,
) -> str:
    """Return how the tokenizer that ``automatic`` loads of a model encodes a text otherwise.

    Args:
        tokenizer: fast tokenizer of transformers.
        automatic: ``AutoTokenizer.from_pretrained``.
        model: folder or hub id.
        texts: compared besides a text of numbers, spaces and several scripts.
        options: further arguments of ``automatic``.

    Returns:
        The first text with both encodings; empty without a difference.
    """
    return _encoding_difference(automatic(model, **options), tokenizer, [*texts, _TEXT])


def _has_own_code(tokenizer: Any) -> bool:
    return getattr(tokenizer, "_auto_class", None) is not None


def _encoding_difference(loaded: Any, expected: Any, texts: Iterable[str]) -> str:
    for text in texts:
        expected_ids = _ids(expected, text)
        try:
            ids = _ids(loaded, text)
        except Exception as error:  # of a class that needs a token which the vocabulary lacks
            return f"{text[:40]!r} not at all ({_first_line(error)})"
        if ids != expected_ids:
            return (
                f"{text[:40]!r} to {len(ids)} tokens {ids[:6]} instead of {len(expected_ids)} "
                f"{expected_ids[:6]}"
            )
    return ""


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, verbose=False)["input_ids"]  # else it logs that a text is long


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _changed_steps(loaded: Any, expected: Any) -> list[str]:
    """Return the steps in which two fast tokenizers differ.

    Post-processors and decoders are compared by their results: offsets and decoding options that
    only encoders use differ between equal ones.
    """
    first, second = (tokenizer_json(each.backend_tokenizer) for each in (loaded, expected))
    changed = [step for step in _STEPS if first.get(step) != second.get(step)]
    if changed:
        return changed
    ids, expected_ids = _ids(loaded, _TEXT), _ids(expected, _TEXT)
    if ids != expected_ids:
        return ["post_processor"]
    return ["decoder"] if loaded.decode(ids) != expected.decode(ids) else []
