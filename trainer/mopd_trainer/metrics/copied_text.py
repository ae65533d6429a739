"""Share of the sampled text that repeats what only a teacher's own prompt has.

A student that learns from a teacher with privileged text (a reference answer, worked examples) may
learn to repeat this text, or to refer to it, instead of the behaviour that it causes.
"""

from collections.abc import Sequence

from mopd_protocol.samples import Message, Rollout

#: Bytes of an n-gram.
GRAM = 8


def copied_share(rollouts: Sequence[Rollout], teacher: str) -> float | None:
    """Return the share of the n-grams of bytes of completions that are copied from the prompt of
    the teacher: in one of its messages, and in none of the student's.

    None if no completion of at least ``GRAM`` bytes was scored behind an own prompt.
    """
    copied = total = 0
    own_grams: dict[int, set[bytes]] = {}  # by prompt
    for rollout in rollouts:
        prompt = rollout.prompt
        if teacher not in prompt.teacher_messages:
            continue
        if prompt.index not in own_grams:
            own = _grams_of(prompt.teacher_messages[teacher])
            own_grams[prompt.index] = own - _grams_of(prompt.messages)
        grams = _grams(rollout.completion.text)
        copied += sum(gram in own_grams[prompt.index] for gram in grams)
        total += len(grams)
    return copied / total if total else None


def _grams_of(messages: Sequence[Message]) -> set[bytes]:
    return {gram for message in messages for gram in _grams(message.content.encode())}


def _grams(text: bytes) -> list[bytes]:
    return [text[at : at + GRAM] for at in range(len(text) - GRAM + 1)]
