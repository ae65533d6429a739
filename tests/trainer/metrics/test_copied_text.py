"""The share of the completions that is copied from a teacher's own prompt."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.samples import Message, Rollout
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_trainer.metrics.copied_text import GRAM, copied_share
from tests.reference.copied_text import copied
from tests.trainer.students import rollout

TEXTS = st.text("ab", max_size=30)


def with_text(text: str, own: list[str] | None, student: list[str], index: int = 0) -> Rollout:
    """Return a completion of a text, with the messages of both sides."""
    sampled = rollout("digit", [5], teachers={"own": 1.0}, index=index)
    messages = [
        tuple(Message(role="user", content=c) for c in side or ()) for side in (own, student)
    ]
    prompt = replace(
        sampled.prompt,
        messages=messages[1],
        teacher_messages={} if own is None else {"own": messages[0]},
    )
    spelled = text.encode()
    completion = TokenSequence(np.array([5]), np.array([len(spelled)]), spelled)
    return replace(sampled, prompt=prompt, completion=completion)


@given(
    st.lists(TEXTS, min_size=1, max_size=3),
    st.lists(TEXTS, min_size=1, max_size=2),
    st.lists(TEXTS, min_size=1, max_size=2),
)
def test_share_is_the_reference(completions: list[str], own: list[str], student: list[str]) -> None:
    rollouts = [with_text(text, own, student) for text in completions]
    sides = ([text.encode() for text in each] for each in (completions, own, student))
    assert copied_share(rollouts, "own") == copied(*sides, GRAM)


def test_share_counts_what_only_the_teachers_prompt_has() -> None:
    problem, solution = "What is 60 + 7?", "The sum of both is 67."
    own = [f"{problem}\n\n{solution}"]
    assert copied_share([with_text(solution, own, [problem])], "own") == 1.0
    assert copied_share([with_text(problem, own, [problem])], "own") == 0.0
    assert copied_share([with_text(solution, None, [problem])], "own") is None
    assert copied_share([with_text(solution, own, [problem])], "other") is None
    two = [with_text(solution, own, [problem]), with_text("9 " * 20, own, [problem], index=1)]
    grams = len(solution) - GRAM + 1
    assert copied_share(two, "own") == pytest.approx(grams / (grams + 40 - GRAM + 1))
