"""``Pipeline``: collect the examples of the next steps while the student is trained.

The policy version of weights is the number of steps behind them. Step ``s`` (from 0) trains version
``s``; its examples are ``s - version`` steps old, at most ``max_staleness``. With 0, a step is
collected after the weights of the previous step have been pushed.
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

#: Collect a step; set the event once all of it is sampled, though not all of it is scored.
Collect = Callable[[int, asyncio.Event], Coroutine[Any, Any, Collected]]

#: Push the current weights to the sampler, as this policy version.
Push = Callable[[int], Awaitable[None]]


class Pipeline:
    """Collect steps in order, at most as far ahead of the pushed weights as the settings allow.

    The weights of the first step are pushed already.
    """

    def __init__(self, collect: Collect, push: Push, config: RolloutConfig, steps: range) -> None:
        self._collect = collect
        self._push = push
        self._max_staleness = config.max_staleness
        self._steps_ahead = config.max_staleness + (config.on_stale == "drop")
        self._version = steps.start
        self._pushed = asyncio.Event()
        self._started: asyncio.Queue[asyncio.Task[Collected]] = asyncio.Queue()
        # Without those returned: a finished task keeps the examples and scores of its step.
        self._tasks: set[asyncio.Task[Collected]] = set()
        self._steps = steps
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to collect in the background, at the latest with the first ``collect``."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def push_weights(self, version: int) -> None:
        """Push the weights after ``version`` steps; later steps are collected with these weights.

        Raises:
            MopdError: when the sampler does not load the weights.
        """
        await self._push(version)
        self._version = version
        self._pushed.set()

    async def collect(self, step: int) -> Collected:
        """Return the examples of the next step, without stale ones, and the dropped samples.

        Raises:
            MopdError: from collecting the step, possibly in an exception group.
        """
        self.start()
        task = await self._started.get()
        examples, dropped = await task
        self._tasks.discard(task)
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
        examples, dropped_again = await self._collect(step, asyncio.Event())
        return examples, _sums(dropped, dropped_again)

    async def _run(self) -> None:
        """Start collecting the steps, each after the previous one is sampled."""
        for step in self._steps:
            while step - self._version > self._steps_ahead:
                self._pushed.clear()
                await self._pushed.wait()
            sampled = asyncio.Event()
            task = asyncio.create_task(self._collect(step, sampled))
            task.add_done_callback(lambda _, event=sampled: event.set())
            self._tasks.add(task)
            self._started.put_nowait(task)
            await sampled.wait()

    async def cancel(self) -> None:
        """Cancel the steps that are still being collected."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def run_pipeline(
    collect: Collect, push: Push, config: RolloutConfig, steps: range
) -> AsyncGenerator[Pipeline]:
    """Open a pipeline of these steps; all its tasks are cancelled on exit."""
    pipeline = Pipeline(collect, push, config, steps)
    try:
        yield pipeline
    finally:
        await pipeline.cancel()


def _sums(first: Metrics, second: Metrics) -> Metrics:
    return {**(Counter(first) + Counter(second))}
