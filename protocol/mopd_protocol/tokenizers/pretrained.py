"""Tokenizers of transformers, as their ``tokenizer.json`` defines them.

For several model types, ``AutoTokenizer`` replaces steps of the file (pre-tokenizer, normalizer) by
those of a Python class, so that a text becomes other tokens than the model was trained on.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_STEPS = ("normalizer", "pre_tokenizer", "model")


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
        exact = from_file(model, revision=revision)
    except (OSError, ValueError):
        if folder.is_dir():
            raise
        return tokenizer  # a hub model without the file, converted by transformers
    loaded, expected = (tokenizer_json(each.backend_tokenizer) for each in (tokenizer, exact))
    changed = [step for step in _STEPS if loaded.get(step) != expected.get(step)]
    if not changed:
        return tokenizer
    logger.info(
        "tokenizer of %s: loaded from its %s, because %s of transformers changes %s",
        model,
        _FILE,
        type(tokenizer).__name__,
        ", ".join(changed),
    )
    return exact
