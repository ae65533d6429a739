"""``Pipeline``: the examples of the next steps are collected while the student is trained.

How far ahead is said in policy versions: a version is the number of steps behind the weights. Step
``s`` (from 0) trains version ``s``, so what it learns from is ``s - version`` steps old, at most
``max_staleness``. With 0 a step is only begun when all before it are trained.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.step_metrics import Metrics

Collected = tuple[list[TrainingExample], Metrics]

#: Collects a step; sets the event when all of it is written, though not all of it scored.
Collect = Callable[[int, asyncio.Event], Coroutine[Any, Any, Collected]]

#: Has the weights of now write from here on: those of this version.
Push = Callable[[int], Awaitable[None]]


class Pipeline:
    """Hands on one step's examples after the other's, collected as far ahead as is allowed."""

    def __init__(
        self, collect: Collect, push: Push, config: RolloutConfig, *, version: int
    ) -> None:
        self._collect = collect
        self._push = push
        self._max_staleness = config.max_staleness
        self._steps_ahead = config.max_staleness + (config.on_stale == "drop")
        self._version = version
        self._moved = asyncio.Event()
        self._begun: asyncio.Queue[asyncio.Task[Collected]] = asyncio.Queue()
        self._running: set[asyncio.Task[Collected]] = set()

    async def examples(self, step: int) -> Collected:
        """The next step's examples, none of them too old, and what was dropped of it.

        To ask is to say that all steps before it are trained: their weights are pushed first.

        Raises:
            MopdError: what collecting it has raised, alone or in an exception group.
        """
        if step > self._version:
            await self._push(step)
            self._version = step
            self._moved.set()
        examples, dropped = await (await self._begun.get())
        fresh = [
            example
            for example in examples
            if step - example.rollout.policy_version <= self._max_staleness
        ]
        if len(fresh) == len(examples):
            return examples, dropped
        stale = float(len(examples) - len(fresh))
        dropped = _sums(dropped, {"dropped/stale": stale, "dropped/total": stale})
        if fresh:
            return fresh, dropped
        again, then_dropped = await self._collect(step, asyncio.Event())
        return again, _sums(dropped, then_dropped)

    async def write_ahead(self, steps: range) -> None:
        """Begins one step after the other; each when the one before it is written."""
        for step in steps:
            while step - self._version > self._steps_ahead:
                self._moved.clear()
                await self._moved.wait()
            written = asyncio.Event()
            collecting = asyncio.create_task(self._collect(step, written))
            collecting.add_done_callback(lambda _, told=written: told.set())
            self._running.add(collecting)
            self._begun.put_nowait(collecting)
            await written.wait()

    async def give_up(self) -> None:
        """Stops what is still being collected."""
        for collecting in self._running:
            collecting.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@asynccontextmanager
async def pipeline(
    collect: Collect, push: Push, config: RolloutConfig, steps: range
) -> AsyncGenerator[Pipeline]:
    """A pipeline at work on these steps; at the end it leaves nothing behind that goes on."""
    made = Pipeline(collect, push, config, version=steps.start)
    writing = asyncio.create_task(made.write_ahead(steps))
    try:
        yield made
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await made.give_up()


def _sums(ours: Metrics, theirs: Metrics) -> Metrics:
    return {**(Counter(ours) + Counter(theirs))}
