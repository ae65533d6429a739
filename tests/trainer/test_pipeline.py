"""Steps that are collected ahead: how far, what is too old, and what becomes of a failure."""

import asyncio
import gc
import weakref
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_protocol.errors import DataError
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.pipeline import Collected, run_pipeline
from tests.trainer.students import ids_of, rollout

pytestmark = pytest.mark.anyio

WRITTEN = replace(rollout("digit", ids_of("digit", "12")), sampled_logprobs=None)


def example_of(version: int) -> TrainingExample:
    """A completion that was written under these weights."""
    return TrainingExample(replace(WRITTEN, policy_version=version), ())


def rules(max_staleness: int, on_stale: str = "wait") -> RolloutConfig:
    return RolloutConfig.model_validate(
        {"max_new_tokens": 4, "max_staleness": max_staleness, "on_stale": on_stale}
    )


async def until_idle() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Writer:
    """Writes one example a step under the newest weights, and remembers when it began what."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.begun: list[tuple[int, int]] = []  # step, and the version it was begun under

    async def collect(self, step: int, written: asyncio.Event) -> Collected:
        self.begun.append((step, self.version))
        example = example_of(self.version)
        written.set()
        await asyncio.sleep(0)
        return [example], {}

    async def push(self, version: int) -> None:
        self.version = version


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
async def test_steps_are_begun_as_far_ahead_as_is_allowed_and_no_further(
    max_staleness: int, on_stale: str
) -> None:
    if on_stale == "drop" and max_staleness == 0:
        return
    writer = Writer(version=3)
    further = max_staleness + (on_stale == "drop")
    config = rules(max_staleness, on_stale)
    async with run_pipeline(writer.collect, writer.push, config, range(3, 13)) as ahead:
        ahead.start()
        for step in range(3, 7):
            await until_idle()
            assert {step for step, _ in writer.begun} == set(range(3, step + further + 1))
            await ahead.collect(step)
            await until_idle()
            assert {step for step, _ in writer.begun} == set(range(3, step + further + 1))
            await ahead.push_weights(step + 1)
            assert writer.version == step + 1


@given(max_staleness=st.integers(0, 4), pauses=st.lists(st.booleans(), min_size=12, max_size=12))
@settings(deadline=None)
def test_nothing_that_is_trained_on_is_older_than_allowed(
    max_staleness: int, pauses: list[bool]
) -> None:
    async def run() -> None:
        writer = Writer()
        config = rules(max_staleness)
        async with run_pipeline(writer.collect, writer.push, config, range(12)) as ahead:
            for step, pause in enumerate(pauses):
                examples, dropped = await ahead.collect(step)
                assert not dropped
                assert 0 <= step - examples[0].rollout.policy_version <= max_staleness
                await ahead.push_weights(step + 1)
                if pause:
                    await until_idle()
        assert [step for step, _ in writer.begun] == list(range(12))

    asyncio.run(run())


async def test_what_is_too_old_is_dropped_and_counted() -> None:
    versions = deque([[0, 0], [0, 1], [0, 1, 2, 1]])

    async def collect(step: int, written: asyncio.Event) -> Collected:
        written.set()
        return [example_of(version) for version in versions.popleft()], {"dropped/total": 1.0}

    async with run_pipeline(collect, Writer().push, rules(1, "drop"), range(3)) as ahead:
        kept: list[list[int]] = []
        output: list[dict[str, float]] = []
        for step in range(3):
            examples, dropped = await ahead.collect(step)
            kept.append([example.rollout.policy_version for example in examples])
            await ahead.push_weights(step + 1)
            output.append(dropped)
    assert kept == [[0, 0], [0, 1], [1, 2, 1]]
    assert output[0] == output[1] == {"dropped/total": 1.0}
    assert output[2] == {"dropped/total": 2.0, "dropped/stale": 1.0}


async def test_a_step_of_which_nothing_is_left_is_written_again() -> None:
    writer = Writer()
    async with run_pipeline(writer.collect, writer.push, rules(1, "drop"), range(3)) as ahead:
        ahead.start()
        await until_idle()  # all three steps are written with the first weights
        for step in range(2):
            await ahead.collect(step)
            await ahead.push_weights(step + 1)
        examples, dropped = await ahead.collect(2)
    assert [example.rollout.policy_version for example in examples] == [2]
    assert dropped == {"dropped/stale": 1.0, "dropped/total": 1.0}
    assert writer.begun == [(0, 0), (1, 0), (2, 0), (2, 2)]


@pytest.mark.parametrize(("max_staleness", "on_stale"), [(0, "wait"), (2, "wait"), (2, "drop")])
async def test_examples_of_earlier_steps_are_released(max_staleness: int, on_stale: str) -> None:
    writer, alive = Writer(), weakref.WeakSet[TrainingExample]()

    async def collect(step: int, written: asyncio.Event) -> Collected:
        examples, dropped = await writer.collect(step, written)
        alive.update(examples)
        return examples, dropped

    config = rules(max_staleness, on_stale)
    async with run_pipeline(collect, writer.push, config, range(40)) as ahead:
        for step in range(40):
            await ahead.collect(step)
            await ahead.push_weights(step + 1)
            await until_idle()
            gc.collect()
            assert len(alive) <= max_staleness + (on_stale == "drop") + 1


async def test_a_failure_is_raised_at_its_step_and_cancels_all_tasks() -> None:
    stopped: list[int] = []

    async def collect(step: int, written: asyncio.Event) -> Collected:
        if step == 1:
            raise DataError("every sample was dropped")
        written.set()
        try:
            if step == 2:
                await asyncio.Event().wait()
        finally:
            stopped.append(step)
        return [example_of(0)], {}

    before = asyncio.all_tasks()
    async with run_pipeline(collect, Writer().push, rules(2), range(9)) as ahead:
        await ahead.collect(0)
        await until_idle()
        with pytest.raises(DataError, match="every sample was dropped"):
            await ahead.collect(1)
    assert stopped == [0, 2]
    assert asyncio.all_tasks() == before
