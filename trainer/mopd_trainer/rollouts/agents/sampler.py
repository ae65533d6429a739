"""``AgentSampler``: trajectories of the user's agent as the completions of a step."""

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from mopd_protocol.errors import ConfigError, TrainingError
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.rollout import RolloutConfig
from mopd_trainer.config.user_functions import import_function
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.agents.endpoint import Endpoint
from mopd_trainer.rollouts.agents.rounds import Rounds, Weights
from mopd_trainer.rollouts.agents.session import ChatStudent, Session
from mopd_trainer.rollouts.source import (
    CompletionBatch,
    CompletionGenerator,
    in_order_of_completion,
)
from mopd_trainer.student.identity import StudentIdentity

logger = logging.getLogger(__name__)


class AgentClient:
    """The student of one trajectory, for the user's agent."""

    def __init__(self, session: Session, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._session = session
        self.chat = session.chat
        """``await chat(messages, tools)``; see ``Session.chat``."""

    @property
    def base_url(self) -> str:
        """Address of the trajectory for clients of the OpenAI API; the server starts on first use.

        The run's settings decide how it samples.
        """
        return self._endpoint.url_of(self._session)


#: The user's function of a prompt and the student.
Agent = Callable[[Prompt, AgentClient], Awaitable[None]]


class AgentSampler:
    """Run the agent ``samples_per_prompt`` times for each prompt: a ``CompletionSource``.

    Each turn of the student is a rollout, which its teachers score behind the conversation as it
    was when the turn was sampled.

    Args:
        generator: samples the turns.
        version: steps behind the student's weights.

    Raises:
        ConfigError: if the agent cannot be imported.
    """

    def __init__(
        self,
        generator: CompletionGenerator,
        student: StudentIdentity,
        config: RolloutConfig,
        *,
        seed: int,
        version: int = 0,
    ) -> None:
        assert config.agent is not None  # checked by the caller
        self._agent = load_agent(config.agent.function)
        self._settings = config.agent
        self._generator = generator
        self._student = ChatStudent.of(student, config, config.agent.max_turns)
        self._config = config
        self._seed = seed
        self._weights = Weights(version)
        self._dropped: Counter[str] = Counter()

    async def sample(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: one trajectory at a time, in order of completion."""
        repeated = [p for p in prompts for _ in range(self._config.samples_per_prompt)]
        rounds = Rounds(
            self._generator,
            self._config,
            seed=derived_seed(self._seed, step),
            weights=self._weights,
            members=len(repeated),
        )
        endpoint = Endpoint(asyncio.get_running_loop())
        sessions = (
            Session(prompt, n, self._student, rounds.generate) for n, prompt in enumerate(repeated)
        )
        calls = (self._trajectory(session, rounds, endpoint) for session in sessions)
        try:
            async with aclosing(in_order_of_completion(calls)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            await rounds.close()
            await asyncio.to_thread(endpoint.close)

    async def push_weights(self, version: int) -> None:
        """See ``CompletionSource``; later turns of a trajectory have the new weights."""
        async with self._weights.lock:
            await self._generator.push_weights(version)
            self._weights.version = version

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        dropped, self._dropped = self._dropped, Counter()
        return dropped

    async def _trajectory(
        self, session: Session, rounds: Rounds, endpoint: Endpoint
    ) -> CompletionBatch:
        failure: Exception | None = None
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                await self._agent(session.prompt, AgentClient(session, endpoint))
        except Exception as error:  # the user's function may raise any
            failure = error
        finally:
            rounds.leave()
        if rounds.failure is not None:
            raise rounds.failure
        rollouts = self._rollouts(session, failure)
        session.ended = session.ended or "complete"
        return CompletionBatch(session.sample, rollouts)

    def _rollouts(self, session: Session, failure: Exception | None) -> list[Rollout]:
        """Return the turns of a trajectory; none if its agent failed."""
        if failure is not None and session.ended is None:
            function, seconds = self._settings.function, self._settings.timeout_seconds
            cause = f"{type(failure).__name__}: {failure}"
            if isinstance(failure, TimeoutError):
                cause = f"no end within {seconds:g} seconds"
            problem = f"rollout.agent: {function} failed for prompt {session.prompt.index}: {cause}"
            if self._settings.on_error == "fail":
                raise TrainingError(
                    f"{problem}. Correct it, or set rollout.agent.on_error to 'drop'.",
                    key="rollout.agent",
                ) from failure
            logger.warning("%s; dropped", problem)
            self._dropped["agent_failed"] += 1
            return []
        if not session.rollouts:
            self._dropped[session.ended or "no_turn"] += 1
        return session.rollouts


def load_agent(name: str) -> Agent:
    """Import ``python:module:function``, from the current folder too.

    Raises:
        ConfigError: if it cannot be imported or is no async function.
    """
    function = import_function(name, key="rollout.agent")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.agent: {name!r} is no async function (found {type(function).__name__}, "
            "expected `async def`)",
            key="rollout.agent",
        )
    return function
