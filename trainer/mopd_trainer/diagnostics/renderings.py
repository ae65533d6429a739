"""Chat templates of two sides: what each shows of a conversation besides its own markup.

A conversation is rendered with the texts of its messages replaced by words that occur nowhere else.
Between these are role headers and control tokens, which differ between families, and text that
the template adds (a default system prompt, a date). A text that is not found was dropped.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from mopd_protocol.messages import Tool, template_tools

#: Message text with the thinking of an assistant's turn: tags, thinking, and the rest.
_THINKING = re.compile(
    r"(?P<open>\s*<(?P<tag>\w*think\w*|reasoning|thought)>\s*)(?P<thinking>.*?)"
    r"(?P<close>\s*</(?P=tag)>\s*)(?P<rest>.*)",
    re.DOTALL,
)
#: Markup that is not listed among the control tokens (``[INST]``, ``<<SYS>>``, ``<|user|>``).
_TAGS = re.compile(
    r"</?(?![^<>\s]*(?:think|reasoning|thought))<?[^<>\s]{1,40}>{1,2}|\[[^\s\[\]]{2,24}\]"
)
_WORDS = re.compile(r"</?[^<>\s]*(?:think|reasoning|thought)[^<>\s]*>|[^\W_]+")
_ROLES = frozenset(
    ("system", "user", "assistant", "model", "human", "bot", "ai", "gpt", "tool", "developer")
)
#: Words of a header; longer texts that every turn repeats are not headers.
_HEADER_WORDS = 4
#: Characters of an excerpt.
_EXCERPT = 60
_SENTINEL = re.compile(r"mopdpart\d+[ta]x")


#: Role and content of each message, and tool calls.
Messages = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A part of a rendering that another template must show, too."""

    kind: str  # message, thinking, or text that the template adds
    value: object
    start: int  # in the characters of the rendering
    end: int


@dataclass(frozen=True, eq=False)
class Side:
    """A tokenizer with a chat template, and the variables that it is rendered with."""

    chat: Any  # PreTrainedTokenizerFast
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def with_tools(self, tools: Sequence[Tool]) -> "Side":
        """Return the side with the tools of a prompt.

        Raises:
            ValueError: if the template shows none.
        """
        own = template_tools(tools, self.chat.chat_template)
        return replace(self, variables={**self.variables, **own}) if own else self

    def render(self, messages: Messages) -> str:
        """Return the rendered conversation, up to the start of the assistant's turn."""
        return self.chat.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            **self.variables,
        )

    def parts(self, messages: Messages) -> list[Rendered]:
        """Return the texts of the messages, and what the template adds, in order."""
        texts: dict[str, str] = {}  # word -> text that it replaces
        plain = [
            {**message, "content": _replaced(message["content"], index, texts)}
            for index, message in enumerate(messages)
        ]
        structure = self.render(plain)
        rendering = self.render(messages)
        exact = _SENTINEL.sub(lambda word: texts[word.group()], structure) == rendering
        parts: list[Rendered] = []
        end, start = 0, 0  # in the structure, and in the rendering
        for word in _SENTINEL.finditer(structure):
            gap, text = structure[end : word.start()], texts[word.group()]
            parts += self._added(gap, start)
            start += len(gap)
            if not exact:
                position = rendering.find(text.strip(), start)
                if position < 0:  # changed by the template
                    start = min(start, len(rendering))
                    parts.append(Rendered("changed text", word.group(), start, start))
                    end = word.end()
                    continue
                start = position
            kind = "thinking" if word.group()[-2] == "t" else "message"
            index = int(word.group()[len("mopdpart") : -2])
            spaces = self._spaces(messages, index) if kind == "message" else ""
            parts.append(Rendered(kind, (index, spaces), start, start + len(text)))
            start += len(text)
            end = word.end()
        return parts + self._added(structure[end:], start)

    def _added(self, gap: str, start: int) -> list[Rendered]:
        words = self._words(gap)
        if not words:
            return []
        kind = "thinking" if all(word.startswith("<") for word in words) else "text"
        return [Rendered(kind, words, start + gap.index(words[0]), start + len(gap))]

    def _words(self, gap: str) -> tuple[str, ...]:
        """Return the words of a gap that are not markup."""
        own = [word for word in _words_of(self._without_tokens(gap)) if word.lower() not in _ROLES]
        return tuple(word for word in own if word not in self._header_words)

    def _without_tokens(self, text: str) -> str:
        for token in self._control_tokens:
            text = text.replace(token, "\n")
        return _TAGS.sub("\n", text)

    @cached_property
    def _control_tokens(self) -> list[str]:
        added = self.chat.added_tokens_decoder.values()
        names = {str(token.content) for token in added if token.special}
        return sorted(names | set(self.chat.all_special_tokens), key=len, reverse=True)

    @cached_property
    def _header_words(self) -> frozenset[str]:
        """Words before the messages of a plain conversation (``GPT4 Correct User:``)."""
        texts: dict[str, str] = {}
        roles = ("user", "assistant") * 2 + ("user",)
        words: set[str] = set()
        structure = self.render(
            [
                {"role": role, "content": _replaced("x", index, texts)}
                for index, role in enumerate(roles)
            ]
        )
        for gap in _SENTINEL.split(structure)[1:-1]:
            lines = [line.strip() for line in self._without_tokens(gap).splitlines()]
            header = next((line for line in reversed(lines) if _words_of(line)), "")
            count = len(_words_of(header))
            if count == 1 or (header.endswith(":") and count <= _HEADER_WORDS):
                words |= {*_words_of(header)}
        return frozenset(word for word in words if not word.startswith("<"))

    def _spaces(self, messages: Messages, index: int) -> str:
        """Return which spaces around a message's text are kept: ``before``, ``after``, or both."""
        content = messages[index]["content"]
        if content == content.strip() or not content.strip():
            return ""
        lead = content[: len(content) - len(content.lstrip())]
        trail = content[len(content.rstrip()) :]
        texts: dict[str, str] = {}
        bare = [
            {**message, "content": _replaced(message["content"].strip(), position, texts)}
            for position, message in enumerate(messages)
        ]
        own = bare[index]["content"]
        spaced = [*bare]
        spaced[index] = {**bare[index], "content": lead + own + trail}
        expected, actual = self.render(bare), self.render(spaced)
        word = own if _SENTINEL.fullmatch(own) else _SENTINEL.findall(own)[-1]
        forms = {"before": lead + word, "after": word + trail, "before, after": lead + word + trail}
        forms = {kept: text for kept, text in forms.items() if text != word}
        kept = [name for name, text in forms.items() if expected.replace(word, text) == actual]
        return kept[-1] if kept else "none"


@dataclass(frozen=True)
class Difference:
    """The first difference of two renderings of a conversation."""

    kind: str
    positions: Sequence[int]  # of each side, in the bytes of its rendering
    excerpts: Sequence[str]


def first_difference(
    messages: Messages, first: Side, second: Side, *, same_tokens: bool
) -> Difference | None:
    """Return the first difference in the text that two sides show; None without one.

    Args:
        same_tokens: all bytes are compared, those of the markup included.
    """
    sides = first, second
    renderings = tuple(side.render(messages) for side in sides)
    if renderings[0] == renderings[1]:
        return None
    parts = [side.parts(messages) for side in sides]
    unmatched = [_unmatched(parts[0], parts[1]), _unmatched(parts[1], parts[0])]
    if any(unmatched):
        ranks = [_rank(each, own) for each, own in zip(unmatched, parts, strict=True)]
        earliest = 0 if ranks[0] <= ranks[1] else 1
        part = unmatched[earliest][0]
        other = 1 - earliest
        starts = {earliest: part.start}
        if ranks[0] == ranks[1]:
            starts[other] = unmatched[other][0].start
        else:
            starts[other] = _same_place(part, parts[earliest], parts[other])
        kind = part.kind
    elif same_tokens:
        kind = "markup"
        pairs = zip(*renderings, strict=False)
        start = next((n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, renderings)))
        starts = {0: start, 1: start}
    else:
        return None
    return Difference(
        kind,
        [len(text[: starts[n]].encode()) for n, text in enumerate(renderings)],
        [text[starts[n] : starts[n] + _EXCERPT] for n, text in enumerate(renderings)],
    )


def _rank(unmatched: Sequence[Rendered], parts: Sequence[Rendered]) -> float:
    """Return how many parts of both sides are before the first unmatched one."""
    return parts.index(unmatched[0]) if unmatched else float("inf")


def without_thinking(messages: Messages) -> Messages:
    """Return the conversation without the thinking of assistant turns."""
    matches = (_THINKING.fullmatch(message["content"]) for message in messages)
    return [
        {**message, "content": match["rest"]} if match else message
        for message, match in zip(messages, matches, strict=True)
    ]


def _unmatched(own: Sequence[Rendered], other: Sequence[Rendered]) -> list[Rendered]:
    """Return the parts that the other side does not have, or has fewer times."""
    rest = Counter((part.kind, part.value) for part in other)
    unmatched: list[Rendered] = []
    for part in own:
        key = part.kind, part.value
        if rest[key]:
            rest[key] -= 1
        else:
            unmatched.append(part)
    return unmatched


def _same_place(part: Rendered, parts: Sequence[Rendered], other: Sequence[Rendered]) -> int:
    """Return where the other side would have a part: behind the last one before it of both."""
    ends = {(each.kind, each.value): each.end for each in other}
    before = reversed(parts[: parts.index(part)])
    known = (ends.get((each.kind, each.value)) for each in before)
    return next((end for end in known if end is not None), 0)


def _replaced(content: str, index: int, texts: dict[str, str]) -> str:
    """Return a message's text with its words replaced, spaces and tags of thinking kept."""

    def word(part: str, text: str) -> str:
        body = text.strip()
        name = f"mopdpart{index}{part}x"
        texts[name] = body
        return text.replace(body, name, 1) if body else text

    match = _THINKING.fullmatch(content)
    if match is None:
        return word("a", content)
    opening, closing = match["open"], match["close"]
    return opening + word("t", match["thinking"]) + closing + word("a", match["rest"])


def _words_of(text: str) -> list[str]:
    return _WORDS.findall(text)
