"""Tokenizers of published kinds, trained on texts like the tasks'.

| | kind | ``January 17, 2024`` |
|---|---|---|
| student | BPE, numbers of up to three digits, as in Llama 3 | ``January| |17|,| |202|4`` |
| unigram | Unigram with byte fallback, as in Gemma | ``J|a|n|u|ar|y| 17|,| 20|24`` |
| digit | BPE, single digits, as in Qwen | ``January| |1|7|,| |2|0|2|4`` |
| free | BPE, digits and punctuation of any length, as in GPT-2 | ``J|an|uary| 17|,| 20|24`` |
| word | BPE, punctuation with line ends, as in GPT-4 | `` siebenundvierzig| Nüsse`` |
| syllable | as free, few tokens | `` |sieb|en|und|v|ier|zig| Nüsse`` |
| words | Unigram with byte fallback, whole words and numbers | ``January| 17|,| 202|4`` |
| phrase | BPE with byte fallback, merged across words, as in Llama 2 | ``▁range(|9|):`` |

``一九四三年十二月二日`` has ten characters of three bytes: 30 tokens for the student and unigram,
ten for ``character_tokenizer``, and ``一九四|三年十二|月二日`` for ``chinese_tokenizer``.

The letters of ``सत्रह जनवरी`` have three bytes each, of which the first two are the same for half
of them: tokens of ``byte_pair_tokenizer`` contain the last byte of a letter and the first two of
the next one, those of ``hindi_tokenizer`` letters and words.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.numerals.numeral_tokenizers import (
    STUDENT_NAMES,
    TEACHER_NAMES,
    ControlNames,
    with_chat_template,
)
from bench.tasks.exercises import (
    ChineseDates,
    CodeBlocks,
    Dates,
    GermanNumbers,
    HindiDates,
    Rows,
    Subtraction,
    TextTask,
    Times,
)
from mopd.demo.tasks import WORDS

_TEXTS = 3_000
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+|\s+"
_PARTS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WRITTEN_OUT = (GermanNumbers(), CodeBlocks())
#: Whole words are so much more frequent than their parts.
_WORD_COUNT = 50


@cache
def student_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with whole months and all numbers of one to three digits."""
    return _byte_level(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", 1_800, 3, STUDENT_NAMES)


@cache
def instruct_tokenizer() -> PreTrainedTokenizerFast:
    """Return ``student_tokenizer`` for a model that ends with the student's padding token."""
    names = replace(STUDENT_NAMES, end=STUDENT_NAMES.padding, padding=STUDENT_NAMES.end)
    tokenizer = Tokenizer.from_str(student_tokenizer().backend_tokenizer.to_str())
    return with_chat_template(tokenizer, names)


@cache
def digit_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with single digits."""
    return _byte_level(rf"{_WORDS}|\p{{N}}|{_REST}", 500, 4, TEACHER_NAMES)


@cache
def free_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that merges digits, and punctuation, to any length."""
    return _byte_level(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+", 480, 5, TEACHER_NAMES)


@cache
def chinese_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with Chinese characters and words of several."""
    tasks = Dates(), ChineseDates()
    return _byte_level(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", 700, 6, STUDENT_NAMES, tasks)


@cache
def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with single digits, letters and Chinese characters."""
    return _byte_level(r"[\s\S]", 400, 7, TEACHER_NAMES, (Dates(), ChineseDates()))


@cache
def hindi_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with Hindi letters and words, and numbers of up to three digits."""
    pattern = r" ?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+"
    tasks = Dates(), HindiDates()
    return _byte_level(pattern, 520, 13, STUDENT_NAMES, tasks, numbers=False)


@cache
def byte_pair_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with parts of Hindi letters and of several."""
    pattern = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+"
    return _byte_level(pattern, 300, 14, TEACHER_NAMES, (HindiDates(),), numbers=False)


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with whole words, and line ends behind punctuation."""
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    pattern = rf"{_WORDS}|\p{{N}}{{1,3}}|{rest}"
    return _byte_level(pattern, 900, 8, STUDENT_NAMES, _WRITTEN_OUT, numbers=False)


@cache
def syllable_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with parts of words."""
    return _byte_level(_PARTS, 420, 9, TEACHER_NAMES, _WRITTEN_OUT, numbers=False)


@cache
def phrase_tokenizer() -> PreTrainedTokenizerFast:
    """Return a BPE with byte fallback whose tokens may contain any text."""
    names = TEACHER_NAMES
    controls = _controls(names)
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token=controls[0]))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # Only for training: of lines without any limit, it would merge whole lines.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁*[^▁\n]+|\n+|▁+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=541,
        special_tokens=controls + [f"<0x{byte:02X}>" for byte in range(256)],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        limit_alphabet=120,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_task_texts(10, _WRITTEN_OUT), trainer)
    description = json.loads(tokenizer.to_str())
    description["pre_tokenizer"] = None
    added = description["added_tokens"]
    description["added_tokens"] = [each for each in added if each["content"] in controls]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.decoder = _byte_fallback_decoder()
    return with_chat_template(tokenizer, names)


def _controls(names: ControlNames) -> list[str]:
    """Return the control tokens of a vocabulary with byte fallback, in the order of their ids."""
    return ["<unk>", names.end, names.padding, names.user, names.assistant]


def _byte_fallback_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _byte_level(
    pattern: str,
    size: int,
    seed: int,
    names: ControlNames,
    tasks: Sequence[TextTask] = (Dates(), Subtraction(), Rows()),
    *,
    numbers: bool = True,
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[names.end, names.padding, names.user, names.assistant],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = itertools.chain(_task_texts(seed, tasks), _numbers() if numbers else ())
    tokenizer.train_from_iterator(texts, trainer)
    return with_chat_template(tokenizer, names)


@cache
def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """Return a Unigram vocabulary that was trained on other words and on pairs of digits."""
    names = TEACHER_NAMES
    controls = _controls(names)
    tokenizer = _divided_at_spaces(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=600,
        special_tokens=controls,
        unk_token=controls[0],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        max_piece_length=4,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_other_texts(seed=2), trainer)
    # The trainer's threads change the last digits, and with them the order of equal pieces.
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    scores = {piece: round(score, 2) for piece, score in pieces}
    # Likelier than their digits, which the trainer's estimate leaves open.
    numbers = {f"{number:02d}": scores["0"] for number in range(100)}
    return _unigram(scores | numbers, names)


@cache
def unigram_word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a Unigram vocabulary of words, their parts, and numbers of up to three digits."""
    counts: Counter[str] = Counter()
    for text in _task_texts(11, (Times(), Dates())):
        for word in re.findall(r" ?[^\W\d]+| ?\d{1,3}|\W", text):
            parts = {word[:n] for n in range(1, 6)} | {word[-n:] for n in range(1, 6)}
            counts.update(dict.fromkeys(parts, 1) | {word: _WORD_COUNT})
    counts.update({str(number): _WORD_COUNT for number in range(1_000)})
    counts.update({f" {number}": _WORD_COUNT for number in range(100)})
    total = counts.total()
    scores = {
        piece.replace(" ", "▁"): round(math.log(count / total), 2)
        for piece, count in counts.items()
    }
    return _unigram(scores, STUDENT_NAMES)


def _divided_at_spaces(model: models.Unigram) -> Tokenizer:
    """Return a tokenizer whose pieces begin with a space, ``▁``, or have none."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    return tokenizer


def _unigram(scores: Mapping[str, float], names: ControlNames) -> PreTrainedTokenizerFast:
    """Return a Unigram vocabulary with byte fallback of pieces with their log-probabilities."""
    controls = _controls(names)
    tokenizer = _divided_at_spaces(models.Unigram([(each, 0.0) for each in controls], 0))
    tokenizer.add_special_tokens(controls)
    description = json.loads(tokenizer.to_str())
    lowest = min(scores.values())
    byte_scores = {f"<0x{byte:02X}>": lowest - 10.0 for byte in range(256)}
    pieces = dict.fromkeys(controls, 0.0) | dict(scores) | byte_scores
    model = description["model"]
    model["vocab"] = sorted(pieces.items(), key=lambda entry: (entry[0] not in controls, entry))
    model["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.decoder = _byte_fallback_decoder()
    return with_chat_template(tokenizer, names)


@cache
def times_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with parts of English words, and of letters with accents."""
    return _byte_level(_PARTS, 360, 12, TEACHER_NAMES, (Times(),), numbers=False)


def _task_texts(seed: int, tasks: Sequence[TextTask]) -> Iterator[str]:
    """Yield prompts and reference answers of tasks."""
    random = Random(seed)
    for _ in range(_TEXTS):
        for task in tasks:
            exercise = task.draw(random)
            yield exercise.prompt
            yield exercise.completion


def _numbers() -> Iterator[str]:
    yield from (str(number) for number in range(1_000) for _ in range(3))


def _other_texts(seed: int) -> Iterator[str]:
    """Yield words that no month begins with, and numbers of pairs of digits."""
    random = Random(seed)
    for _ in range(_TEXTS):
        yield f"{random.choice(WORDS)} {random.randrange(1, 32)}, {random.choice((19, 20))}"
        yield f"{random.randrange(100):02d}"
