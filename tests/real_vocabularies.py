"""Published vocabularies at full size, as fast tokenizers, without a network.

``mistral-common`` bundles Tekken (131,072 ids, byte-level, as tiktoken ranks) and SentencePiece
models of 32,000 and 32,768 ids with byte fallback. A byte-level BPE trained on
Python's standard library differs from Tekken in its text and its pre-tokenizer.
"""

import base64
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from mopd_protocol.runtime.atomic_file import replacing
from mopd_protocol.tokenizers.token_table import (
    TextEncoder,
    TokenRoles,
    TokenTable,
    byte_level_alphabet,
)

NAMES = ("tekken", "v3", "python_50k")
BUNDLED = Path(str(files("mistral_common"))) / "data"
TEKKEN = BUNDLED / "tekken_240911.json"
SENTENCEPIECE = {
    "v1": BUNDLED / "tokenizer.model.v1",
    "v3": BUNDLED / "mistral_instruct_tokenizer_240323.model.v3",
}
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
TRANSFORMERS = Path(str(files("transformers")))
PYTHON_BPE = {
    "python_50k": (50_000, (STANDARD_LIBRARY,)),
    "python_131k": (131_072, (STANDARD_LIBRARY, TRANSFORMERS)),
}
#: Names that ``tokenizer_and_roles`` loads.
PUBLISHED = ("tekken", "tekken_shuffled", *SENTENCEPIECE, *PYTHON_BPE)
TRAINED = Path(__file__).parents[1] / ".pytest_cache" / "real_vocabularies"

#: Twelve scripts, joined emoji, code with tabs and carriage returns, numbers and rare bytes.
MIXED_TEXT = """\
Grüße aus Köln, où êtes-vous? Ålesund, łódź, İstanbul — naïve façade…
Привет, мир! Съешь ещё этих мягких французских булок, да выпей чаю.
Γειά σου Κόσμε· τι κάνεις;
你好，世界。床前明月光，疑是地上霜。漢字仮名交じり文：カタカナ、ひらがな。
안녕하세요 세계! 다람쥐 헌 쳇바퀴에 타고파
שלום עולם, מה נשמע?
مرحبا بالعالم، كيف حالك؟ ١٢٣٤
नमस्ते दुनिया, आप कैसे हैं? क्ष त्र ज्ञ
สวัสดีชาวโลก สบายดีไหม ๑๒๓
ওহে বিশ্ব, কেমন আছো? தமிழ் வணக்கம் உலகம்
გამარჯობა მსოფლიო, Բարեւ աշխարհ
👨‍👩‍👧‍👦 🏳️‍🌈 👩🏽‍🚀🙂🙂 1️⃣ 🇩🇪🇫🇷 e\u0301 z\u0308\u0323
def f(x: int) -> int:\r\n\treturn x ** 2  # twice\r\n\r\n\n\n    print(f(12345))\r
3.14159 265358 979,323 1e-10 0xFF 1999.50 20000000001
\t\ttabs\t and   runs    of          spaces  \n\n\n
<|im_end|> </s> [INST] <s> <0x41> <0x0A> are only text
and so are \x00 \x01 \u200b \ufeff \U0001f9ff 𓀀 𝔘
"""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """One tokenizer, and the width of a head with padding rows."""

    tokenizer: Tokenizer
    table: TokenTable
    encoder: TextEncoder
    logit_width: int


@cache
def real(name: str) -> Vocabulary:
    """Load a vocabulary: one of ``NAMES``, ``tekken_shuffled``, ``v1`` or ``python_131k``."""
    tokenizer, roles = tokenizer_and_roles(name)
    table = TokenTable.from_tokenizer(tokenizer, roles)
    return Vocabulary(tokenizer, table, TextEncoder(tokenizer, table), table.size + 48)


def tokenizer_and_roles(name: str) -> tuple[Tokenizer, TokenRoles]:
    """Load the tokenizer and the roles of a vocabulary of ``real``."""
    if name in ("tekken", "tekken_shuffled"):
        roles = TokenRoles(bos=1, eos=2, end_of_turn=2, pad=11)
        return tekken(shuffled=name == "tekken_shuffled"), roles
    if name in SENTENCEPIECE:
        return sentencepiece(SENTENCEPIECE[name]), TokenRoles(bos=1, eos=2)
    size, folders = PYTHON_BPE[name]
    return python_bpe(size, folders), TokenRoles(eos=0, end_of_turn=1)


def tekken(*, shuffled: bool = False) -> Tokenizer:
    """Build byte-level BPE from tiktoken ranks, control tokens first, as in published models.

    tiktoken merges the pair that spells the token of the lowest rank, so that every way to cut a
    token into two tokens is a merge, in the order of ranks. ``shuffled`` shuffles the ids of
    text tokens: the same tokens in another order, as a second vocabulary of this size.
    """
    description = json.loads(TEKKEN.read_text(encoding="utf-8"))
    config = description["config"]
    controls: int = config["default_num_special_tokens"]
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    surfaces = [
        "".join(alphabet[byte] for byte in base64.b64decode(entry["token_bytes"]))
        for entry in description["vocab"][: config["default_vocab_size"] - controls]
    ]
    names = [*_TEKKEN_CONTROLS, *(f"<SPECIAL_{n}>" for n in range(len(_TEKKEN_CONTROLS), controls))]
    ids = list(range(controls, controls + len(surfaces)))
    if shuffled:
        random.Random(0).shuffle(ids)
    vocabulary = dict(zip([*names, *surfaces], [*range(controls), *ids], strict=True))
    known = {*surfaces}
    merges = [
        (surface[:cut], surface[cut:])
        for surface in surfaces
        for cut in range(1, len(surface))
        if surface[:cut] in known and surface[cut:] in known
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return tokenizer


def sentencepiece(path: Path) -> Tokenizer:
    """Convert a SentencePiece BPE with byte fallback, as transformers converts Llama's."""
    from transformers.utils import sentencepiece_model_pb2_new as model_pb2

    model = model_pb2.ModelProto()
    model.ParseFromString(path.read_bytes())
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece.piece: token_id for token_id, piece in enumerate(model.pieces)},
            merges=_merges_by_score({p.piece: p.score for p in model.pieces if p.type == _NORMAL}),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(_added(model.pieces, _UNKNOWN, _CONTROL))
    tokenizer.add_tokens(_added(model.pieces, _USER_DEFINED))
    return tokenizer


def _added(pieces: Iterable[Any], *kinds: int) -> list[AddedToken]:
    return [AddedToken(piece.piece, normalized=False) for piece in pieces if piece.type in kinds]


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """List every split of a piece into two pieces, the best pieces first."""
    merges = [
        (piece[:cut], piece[cut:], score)
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merges.sort(key=lambda merge: -merge[2])
    return [(left, right) for left, right, _ in merges]


def python_bpe(size: int, folders: Sequence[Path]) -> Tokenizer:
    """Train byte-level BPE with GPT-2's words on Python sources; cached by their sizes."""
    sources = [path for folder in folders for path in python_sources(folder)]
    identity = [size, version("tokenizers"), [[str(p), p.stat().st_size] for p in sources]]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    path = TRAINED / f"python-{size}-{key}.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sources)
    tokenizer.train_from_iterator(texts, trainer)
    with replacing(path) as temporary:
        tokenizer.save(str(temporary))
    return tokenizer


def python_sources(folder: Path) -> list[Path]:
    """List the Python files under a folder in order, without installed packages."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if "site-packages" not in path.relative_to(folder).parts
    )


#: Types of pieces in a SentencePiece model.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_TEKKEN_CONTROLS = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
