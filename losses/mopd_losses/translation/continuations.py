"""``Continuations``: short texts that may follow some text, to see what a tokenizer makes of it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from mopd_losses.alignment.byte_strings import utf8_text
from mopd_losses.translation.vocabulary import Vocabulary

#: Behind any text: its end, white space, punctuation, letters and digits; and more kinds of words
#: that tokenizers divide in another way (numbers of several digits, contractions).
_GENERAL = ("", " a", "\n", ".", "a", "1")
_MORE_GENERAL = ("  ", "\na", ",", "'s", "111", "A", "é")

#: Of the characters that follow a character in tokens, and of longer strings behind it and behind
#: two characters: some, and many.
_FEW, _MANY = (10, 4, 4), (26, 48, 16)

#: Characters of these strings.
_LONGEST = 3

#: Characters of tokens that complete the bytes of half a character; others are added.
_KNOWN = 48

#: Longest run of white space that is continued, which tokenizers divide by its length.
_LONGEST_RUN = 16


class Continuations:
    """Continuations by the last two characters of a text, of those that vocabularies have behind
    them: only these can be in one token with it."""

    def __init__(self, vocabularies: Iterable[Vocabulary]) -> None:
        following: defaultdict[str, Counter[str]] = defaultdict(Counter)
        characters: Counter[str] = Counter()
        for text in (text for each in vocabularies for text in each.texts()):
            characters.update(text)
            for at in range(1, len(text)):
                behind = [following[text[at - 1]], following[text[max(at - 2, 0) : at]]]
                for end in range(at + 1, min(at + _LONGEST, len(text)) + 1):
                    for counts in behind[: min(at, 2)]:
                        counts[text[at:end]] += 1
        self._following = following
        self._characters = [character.encode() for character, _ in characters.most_common()]
        self._completions: dict[str, tuple[str, ...]] = {}
        self._known: dict[tuple[str, bool], tuple[str, ...]] = {}

    def behind(self, string: str, *, thorough: bool = False) -> tuple[str, ...]:
        """Return continuations of a string of bytes, as such strings."""
        begun = _incomplete_character(string)
        if begun:
            if begun not in self._completions:
                self._completions[begun] = self._completing(begun)
            return self._completions[begun]
        end = len(string)
        start = max(end - 8, 0)
        while start < end and utf8_text(string[start:end]) is None:
            start += 1
        last = (utf8_text(string[start:end]) or " ")[-2:]
        if (last, thorough) not in self._known:
            texts = [*_GENERAL, *(_MORE_GENERAL if thorough else ())]
            counts = _MANY if thorough else _FEW
            single, double = (self._ranked(key) for key in (last[-1], last))
            texts += [text for text in single if len(text) == 1][: counts[0]]
            texts += [text for text in single if len(text) > 1][: counts[1]]
            texts += [text for text in double if len(text) > 1][: counts[2]]
            if last[-1].isspace():
                runs = [last[-1] * length for length in range(1, _LONGEST_RUN)]
                texts += [run + word for run in runs for word in ("", "a", "1", "#")]
            encoded = (text.encode().decode("latin-1") for text in texts)
            self._known[last, thorough] = tuple(dict.fromkeys(encoded))
        return self._known[last, thorough]

    def _ranked(self, key: str) -> list[str]:
        return [text for text, _ in self._following.get(key, Counter[str]()).most_common(128)]

    def likeliest(self, string: str) -> tuple[str, ...]:
        """Return the likeliest ends of a word or of half a character."""
        behind = self.behind(string)
        return behind[:4] if _incomplete_character(string) else behind[len(_GENERAL) :][:6]

    def _completing(self, begun: str) -> tuple[str, ...]:
        """Return the ends of characters: frequent ones, and others, which are several tokens."""
        start = begun.encode("latin-1")
        known = [each[len(start) :] for each in self._characters if each.startswith(start)]
        return tuple(
            dict.fromkeys(
                [*(each.decode("latin-1") for each in known[:_KNOWN]), *_any_completions(begun)]
            )
        )


def _incomplete_character(string: str) -> str:
    """Return the bytes with which a character begins at the end of a string; empty if it ends with
    a complete one."""
    for length in range(1, min(4, len(string) + 1)):
        byte = ord(string[-length])
        if byte >= 0xC0:
            return string[-length:] if length < _character_length(byte) else ""
        if byte < 0x80:
            return ""
    return ""


def _character_length(first: int) -> int:
    """Return the number of bytes of a character of several, by its first byte."""
    return 2 + (first >= 0xE0) + (first >= 0xF0)


def _any_completions(begun: str) -> Iterator[str]:
    """Yield some ends of the characters that begin with some bytes, from all over their range."""
    missing = _character_length(ord(begun[0])) - len(begun)
    count = 64**missing
    for number in range(0, count, max(count // 64, 1)):
        codes = (0x80 + (number >> 6 * at) % 64 for at in reversed(range(missing)))
        end = "".join(map(chr, codes))
        if utf8_text(begun + end) is not None:
            yield end
