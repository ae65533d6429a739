"""Requests of training steps: lengths, and times of arrival."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.scaling.simulation import Request, ScoredSequence
from mopd_client.request_parts import LIMITS

#: Of ``mopd_client.request_parts``.
_REQUESTS_PER_REPLICA = 2


@dataclass(frozen=True)
class Step:
    """A training step's completions; lengths are gamma distributed around the averages."""

    prompts: int
    samples: int
    prompt_tokens: int
    completion_tokens: int
    spread: float = 0.5
    """Standard deviation of the lengths, as a share of the average."""


def streamed(
    step: Step, *, rows_per_second: float, steps: int, seed: int, sample_seconds: float = 0.0
) -> list[Request]:
    """Return one request for each completion, prompts in a Poisson process (``scoring: stream``).

    Args:
        step: of each of the ``steps``.
        rows_per_second: average rate of completion tokens; infinite: all arrive at once.
        steps: number of steps.
        seed: of lengths and arrivals.
        sample_seconds: average delay of a completion after the first possible time of its prompt.
    """
    generator = np.random.default_rng(seed)
    prompts = step.prompts * steps
    gap = step.samples * step.completion_tokens / rows_per_second
    arrivals = np.cumsum(generator.exponential(gap, prompts)) if gap else np.zeros(prompts)
    requests = [
        Request(float(arrival + delay), (sequence,))
        for arrival, group in zip(arrivals, _groups(step, prompts, generator), strict=True)
        for sequence, delay in zip(
            group, generator.exponential(sample_seconds, step.samples), strict=True
        )
    ]
    return sorted(requests, key=lambda request: request.arrival)


def after_rollout(
    step: Step, *, step_seconds: float, steps: int, replicas: int, top_k: int, seed: int
) -> list[Request]:
    """Return all completions of a step at once, every ``step_seconds``.

    The trainer does so with ``scoring: after_rollout``, and the client divides them: samples of a
    prompt together, two requests for each of several replicas, within the limits of a request.
    """
    generator = np.random.default_rng(seed)
    requests: list[Request] = []
    for number in range(steps):
        groups = [*_groups(step, step.prompts, generator, first=number * step.prompts)]
        total = sum(each.tokens for group in groups for each in group)
        most = total if replicas == 1 else total / replicas / _REQUESTS_PER_REPLICA
        part: list[ScoredSequence] = []
        for group in groups:
            together = [*part, *group]
            if part and (
                sum(each.tokens for each in together) > most
                or sum(each.completion_tokens for each in together) * top_k > LIMITS["entries"]
                or len(together) > LIMITS["sequences"]
            ):
                requests.append(Request(number * step_seconds, tuple(part)))
                together = group
            part = together
        requests.append(Request(number * step_seconds, tuple(part)))
    return requests


def _groups(
    step: Step, prompts: int, generator: np.random.Generator, first: int = 0
) -> Iterator[list[ScoredSequence]]:
    for number in range(first, first + prompts):
        prompt_tokens = _length(step.prompt_tokens, step.spread, generator)
        yield [
            ScoredSequence(
                number, prompt_tokens, _length(step.completion_tokens, step.spread, generator)
            )
            for _ in range(step.samples)
        ]


def _length(average: int, spread: float, generator: np.random.Generator) -> int:
    if not spread:
        return average
    return max(1, round(generator.gamma(spread**-2, average * spread**2)))
