"""``serve_student``: a student for the agents of its user, outside a run."""

import asyncio
from collections.abc import Callable

from mopd_protocol.errors import ConfigError
from mopd_protocol.messages import Message
from mopd_protocol.samples import Prompt
from mopd_trainer.config.rollout import RolloutConfig
from mopd_trainer.rollouts.agents.endpoint import Endpoint
from mopd_trainer.rollouts.agents.rounds import Rounds, Weights
from mopd_trainer.rollouts.agents.session import ChatStudent, Session
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student

_PROMPT = Prompt(index=0, messages=(Message(role="user", content=""),), teachers={})


async def serve_student(
    student: Student,
    config: RolloutConfig,
    *,
    host: str,
    port: int,
    announce: Callable[[str], None],
) -> None:
    """Serve ``POST /v1/chat/completions`` until the task is cancelled.

    Each request is a separate trajectory; requests that wait together are sampled together.

    Args:
        port: 0 for a free one.
        announce: called with the base address.

    Raises:
        ConfigError: if the address is in use or not available.
    """
    chat_student = ChatStudent.of(student.identity, config, max_turns=1)
    sampler = Sampler(student, config, seed=0)
    rounds = Rounds(sampler, config, seed=0, weights=Weights(0))

    def new_session() -> Session:
        return Session(_PROMPT, 0, chat_student, rounds.generate)

    loop = asyncio.get_running_loop()
    endpoint = Endpoint(loop, new_session=new_session, host=host, port=port)
    try:
        address = endpoint.start()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port: listening on {host}:{port} failed: {error}. Choose another port, or 0 for a "
            "free one.",
            key="port",
        ) from error
    announce(f"{address}/v1")
    try:
        await asyncio.Event().wait()
    finally:
        await rounds.close()
        await asyncio.to_thread(endpoint.close)
