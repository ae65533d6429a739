"""Reads a fast tokenizer's JSON: what kind it is, its fingerprint, its continuation form.

The JSON (``tokenizer.json``, or ``Tokenizer.to_str()``) is the one description of a fast
tokenizer that does not depend on a Python wrapper class, so everything here starts from it.
"""

import hashlib
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mopd_protocol.errors import TokenizerError

JSON = dict[str, Any]
TokenizerKind = Literal["byte_level", "metaspace"]


def tokenizer_json(tokenizer: Tokenizer) -> JSON:
    """The tokenizer's full description as plain data."""
    return json.loads(tokenizer.to_str())


@contextmanager
def naming_tokenizer(source: str) -> Generator[None]:
    """Name a file, folder, hub id or setting in the errors of its tokenizer."""
    try:
        yield
    except TokenizerError as error:
        raise TokenizerError(f"{source}: {error}", key=source) from error


def merges_of(description: JSON) -> NDArray[np.int64]:
    """[merges, 3], ids of the left part, the right part and the whole, first merge first; none of a
    tokenizer that does not merge (BPE)."""
    model = description["model"]
    if model["type"] != "BPE":
        return np.zeros((0, 3), dtype=np.int64)
    ids = model["vocab"]
    parts = (each if isinstance(each, list) else each.split(" ") for each in model["merges"])
    merges = [(ids[left], ids[right], ids[left + right]) for left, right in parts]
    return np.array(merges, dtype=np.int64).reshape(-1, 3)


def fingerprint(description: JSON) -> str:
    """32 hex digits that name a tokenizer's behaviour.

    Hashes vocabulary, merges, normalizer, pre-tokenizer and added tokens. Padding, truncation and
    post-processing (added BOS) are not hashed: they do not change how text becomes tokens.
    """
    decisive = {key: description.get(key) for key in ("model", "normalizer", "pre_tokenizer")}
    decisive["added_tokens"] = sorted(
        description.get("added_tokens") or [], key=lambda token: token["id"]
    )
    canonical = json.dumps(decisive, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def kind_of(description: JSON) -> TokenizerKind:
    """Return the kind: surfaces in the byte-level alphabet, or text with ``▁`` for a space.

    Raises:
        TokenizerError: for tokenizers whose tokens do not determine their bytes (WordPiece, whose
            spaces are between tokens, models without a reversible space, and models that mark
            tokens by a prefix or suffix, such as ``</w>``).
    """
    steps = [
        step
        for key in ("pre_tokenizer", "decoder", "normalizer")
        for step in _steps(description.get(key))
    ]
    types = {step["type"] for step in steps}
    settings: JSON = description.get("model") or {}
    model = settings.get("type")
    marks = {
        key: settings[key]
        for key in ("continuing_subword_prefix", "end_of_word_suffix")
        if settings.get(key)
    }
    if marks and model == "BPE":
        raise TokenizerError(
            f"unsupported tokenizer: its tokens contain a mark that no text has (found {marks}); "
            "expected byte-level BPE without end_of_word_suffix and continuing_subword_prefix, or "
            "a SentencePiece-style tokenizer that writes spaces as ▁"
        )
    if model != "WordPiece" and "WordPiece" not in types:
        if "ByteLevel" in types:
            return "byte_level"
        if "Metaspace" in types or any(_writes_spaces_as_metaspace(step) for step in steps):
            return "metaspace"
    raise TokenizerError(
        f"unsupported tokenizer: tokens of a {model} tokenizer with steps {sorted(types)} have no "
        f"defined bytes; expected byte-level BPE, or a SentencePiece-style tokenizer that "
        "writes spaces as ▁"
    )


def metaspace_of(description: JSON) -> str:
    """The character that stands for a space in a SentencePiece-style tokenizer."""
    for key in ("pre_tokenizer", "decoder"):
        for step in _steps(description.get(key)):
            if step["type"] == "Metaspace":
                return step["replacement"]
    return "▁"


def has_byte_fallback(description: JSON) -> bool:
    """Return whether surfaces such as ``<0x0A>`` stand for single bytes."""
    decoder_types = {step["type"] for step in _steps(description.get("decoder"))}
    return bool(description["model"].get("byte_fallback")) or "ByteFallback" in decoder_types


def spells_every_text(description: JSON) -> bool:
    """Return whether the tokens of any text spell its bytes, up to normalization to NFC.

    False if a step may drop or rewrite characters, or the vocabulary lacks single bytes.
    """
    surfaces = _model_surfaces(description["model"])
    if kind_of(description) == "byte_level":
        complete = surfaces.issuperset(byte_level_alphabet())
    else:
        complete = has_byte_fallback(description) and surfaces.issuperset(
            f"<0x{byte:02X}>" for byte in range(256)
        )
    normalizers = [*_steps(description.get("normalizer"))]
    splitters = [*_steps(description.get("pre_tokenizer"))]
    return (
        complete
        and all(
            step["type"] in ("Sequence", "NFC", "Prepend") or _writes_spaces_as_metaspace(step)
            for step in normalizers
        )
        and all(
            step["type"] in ("Sequence", "ByteLevel", "Digits", "Metaspace", "Split")
            and step.get("behavior") != "Removed"
            for step in splitters
        )
    )


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the alphabet in which byte-level BPE writes its surfaces.

    Printable bytes stand for themselves (33-126, 161-172, 174-255); the other 68, in increasing
    order, are U+0100 onwards (GPT-2's published mapping).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    characters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]
    return dict(zip(characters, printable + others, strict=True))


def continuation_tokenizer(description: JSON) -> Tokenizer:
    """The same tokenizer for text in the middle of a sequence, where every character is text.

    Removed are the added leading space, the stripping of spaces at the ends of a text and around
    added tokens, the post-processor (BOS, EOS), and every way in which text that spells
    ``<|im_end|>`` could become a control token. The boundary to the preceding text is then a byte
    boundary by construction. Ids are unchanged.

    Raises:
        TokenizerError: when an added token would get another id.
    """
    added: list[JSON] = description.get("added_tokens") or []
    model = _model_with(added, description["model"])
    controls = {token["content"] for token in added if token["special"]} & _model_surfaces(model)
    kept: list[JSON] = [
        {**token, "lstrip": False, "rstrip": False}
        for token in added
        if token["content"] not in controls
    ]
    edited: JSON = {
        **description,
        "model": _model_without(controls, model),
        "added_tokens": kept,
        "normalizer": _for_continuations(description.get("normalizer")),
        "pre_tokenizer": _for_continuations(description.get("pre_tokenizer")),
        "post_processor": None,
        "padding": None,
        "truncation": None,
    }
    tokenizer = Tokenizer.from_str(json.dumps(edited))
    # Control tokens behind a Unigram vocabulary stay listed: the library numbers added tokens in
    # their order. This setting keeps them from being found in text.
    tokenizer.encode_special_tokens = True
    for token in kept:
        token_id = tokenizer.token_to_id(token["content"])
        if token_id != token["id"]:
            raise TokenizerError(
                f"added token {token['content']!r} has id {token['id']}, but the tokenizers "
                f"library numbers it {token_id}; expected added tokens numbered without gaps"
            )
    return tokenizer


def _model_surfaces(model: JSON) -> set[str]:
    vocabulary = model["vocab"]
    return {entry[0] for entry in vocabulary} if isinstance(vocabulary, list) else {*vocabulary}


def _model_with(added: list[JSON], model: JSON) -> JSON:
    """The model with added tokens in its vocabulary, where that has an id for each surface.

    The library numbers other added tokens in their order behind the vocabulary, or behind the last
    one: published vocabularies have gaps (100260, 100276), which it would fill once the control
    tokens are removed. No merge leads to an added token.
    """
    if isinstance(model["vocab"], list):
        return model
    return {**model, "vocab": {token["content"]: token["id"] for token in added} | model["vocab"]}


def _model_without(controls: set[str], model: JSON) -> JSON:
    """The model, unable to spell ``controls`` out of text; every id keeps its place.

    A SentencePiece vocabulary contains ``</s>`` like any word, and merges or a best path can lead
    to it. Control tokens get a surface with a space, which no text has once spaces are ``▁`` or
    ``Ġ``.
    """

    def renamed(surface: str) -> str:
        return f"{surface} control" if surface in controls else surface

    edited = dict(model)
    if isinstance(model["vocab"], list):
        edited["vocab"] = [[renamed(surface), score] for surface, score in model["vocab"]]
    else:
        edited["vocab"] = {renamed(surface): token for surface, token in model["vocab"].items()}
    if "merges" in model:
        edited["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if controls.isdisjoint((left, right, left + right))
        ]
    if model.get("unk_token"):
        edited["unk_token"] = renamed(model["unk_token"])
    return edited


def _steps(step: JSON | None) -> Iterator[JSON]:
    """A pipeline step and, where it is a sequence, all the steps in it."""
    if step is None:
        return
    yield step
    for key in ("pretokenizers", "normalizers", "decoders"):
        for inner in step.get(key) or []:
            yield from _steps(inner)


def _writes_spaces_as_metaspace(step: JSON) -> bool:
    return (
        step["type"] == "Replace"
        and (step.get("pattern") or {}).get("String") == " "
        and step.get("content") == "▁"
    )


def _for_continuations(step: JSON | None) -> JSON | None:
    """A normalizer or pre-tokenizer that keeps the ends of a text as they are."""
    if step is None or step["type"] in ("Prepend", "Strip"):
        return None
    edited = dict(step)
    if step["type"] == "Metaspace":
        edited["prepend_scheme"] = "never"
    if step["type"] == "ByteLevel":
        edited["add_prefix_space"] = False
    for key in ("pretokenizers", "normalizers"):
        if key in step:
            kept = (_for_continuations(inner) for inner in step[key])
            edited[key] = [inner for inner in kept if inner is not None]
    return edited
