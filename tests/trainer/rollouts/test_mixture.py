"""A mixture of sources: how many prompts each gets, which ones, and that this is never random."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.rollouts.source import CompletionBatch, Mixture
from tests.trainer.students import MESSAGES, ids_of, rollout

PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(12)]


@cache
def written(text: str) -> Rollout:
    """Return a completion with this text."""
    return rollout("digit", ids_of("digit", text))


class RecordedSource:
    """A source that only records its requests."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self.requests_of_step: dict[int, list[int]] = {}
        self.version = 0

    async def sample(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """A batch a prompt."""
        self.requests_of_step[step] = [prompt.index for prompt in prompts]
        for place in range(len(prompts)):
            yield CompletionBatch(place, [written(self._reason)])

    async def push_weights(self, version: int) -> None:
        """Remembers it."""
        self.version = version

    def pop_dropped(self) -> Counter[str]:
        """One sample, always."""
        return Counter([self._reason])


def requests(
    share: float, steps: Sequence[int], *, count: int = 12, seed: int = 0
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Map each step to the prompts of the student, and to those of the references."""
    rollouts, references = RecordedSource("own"), RecordedSource("given")
    mixture = Mixture(rollouts, references, rollout_share=share, seed=seed)

    async def complete() -> None:
        for step in steps:
            async for _ in mixture.sample(PROMPTS[:count], step=step):
                pass

    asyncio.run(complete())
    return rollouts.requests_of_step, references.requests_of_step


@given(share=st.floats(0, 1), count=st.integers(1, 12), steps=st.integers(1, 30))
def test_every_prompt_has_one_source_and_shares_are_kept(
    share: float, count: int, steps: int
) -> None:
    own, reference = requests(share, range(steps), count=count)
    for step in range(steps):
        assert sorted(own[step] + reference[step]) == list(range(count))
        assert abs(len(own[step]) - share * count) <= 1
        assert own[step] == sorted(own[step])  # in the step's own order
    assert abs(sum(map(len, own.values())) - share * count * steps) <= 0.5 + 1e-9


def test_what_a_step_takes_does_not_depend_on_the_steps_before() -> None:
    whole, _ = requests(0.4, range(20))
    assert requests(0.4, [13])[0][13] == whole[13]
    assert requests(0.4, [13], seed=1)[0][13] != whole[13]


def test_no_place_in_a_step_belongs_to_one_source() -> None:
    own, _ = requests(0.5, range(40))
    often = Counter(index for chosen in own.values() for index in chosen)
    assert set(often) == set(range(12))
    assert max(often.values()) < 40


@pytest.mark.anyio
@pytest.mark.parametrize("share", [0.25, 0.75])
async def test_references_come_before_sampled_completions(share: float) -> None:
    mixture = Mixture(RecordedSource("own"), RecordedSource("given"), rollout_share=share, seed=0)
    actual = [each async for each in mixture.sample(PROMPTS, step=0)]
    output = [each.rollouts[0].completion.text.decode() for each in actual]
    assert output == sorted(output)
    assert [each.place for each in actual] == list(range(12))
    assert Counter(output) == {"given": 12 - 12 * share, "own": 12 * share}
    assert mixture.pop_dropped() == {"own": 1, "given": 1}
