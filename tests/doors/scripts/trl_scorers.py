"""TRL's synchronous and asynchronous scorers: rows of (id, logprob) behind each prompt."""

import asyncio
import multiprocessing
import sys
from typing import Any

import aiohttp
from accelerate import PartialState
from job import finish, load_job
from trl.experimental.async_distillation import async_rollout_worker
from trl.generation import vllm_client

JOB = load_job()
URL, TOP_K, TEMPERATURE = JOB["url"], JOB["top_k"], JOB["temperature"]
SEQUENCES, PROMPTS = JOB["sequences"], JOB["prompt_lengths"]


def synchronous() -> dict[str, Any]:
    """Score with ``VLLMClient``, whose only need of vLLM is this check."""
    vllm_client.is_vllm_available = lambda: True
    client = vllm_client.VLLMClient(base_url=URL, connection_timeout=60.0)
    return client.get_sequence_logprobs(
        SEQUENCES, PROMPTS, top_logprobs=TOP_K, temperature=TEMPERATURE, chunk_size=2
    )


async def asynchronous() -> list[list[list[Any]]]:
    """Score with the rollout loop of ``AsyncDistillationTrainer``."""
    context = multiprocessing.get_context("spawn")
    loop = async_rollout_worker._AsyncRolloutLoop(
        model_name="student",
        dataset=[],
        processing_class=None,
        eos_token_ids=[],
        rollout_buffer=context.Queue(),
        model_version_value=context.Value("i", 0),
        heartbeat_value=context.Value("d", 0.0),
        failed_event=context.Event(),
        exception_info_queue=context.Queue(),
        metrics_queue=context.Queue(),
        teacher_server_urls={"math": URL},
        teacher_top_k=TOP_K,
        teacher_temperature=TEMPERATURE,
    )
    rows = []
    async with aiohttp.ClientSession() as loop.session:
        await loop._resolve_teacher_model_names()
        for ids, start in zip(SEQUENCES, PROMPTS, strict=True):
            name = loop.teacher_model_names["math"]
            rows.append(await loop._score_with_teacher(ids[:start], ids[start:], URL, name))
    return rows


def own() -> dict[str, Any]:
    """Score with mopd's client, in an environment without vLLM."""
    from mopd.integrations.trl import TeacherService

    client = TeacherService(base_url=URL, connection_timeout=60.0)
    try:
        return client.get_sequence_logprobs(
            SEQUENCES, PROMPTS, top_logprobs=TOP_K, temperature=TEMPERATURE
        )
    finally:
        client.close()


assert "vllm" not in sys.modules
PartialState()  # TRL's logger needs it
finish({"sync": synchronous(), "async": asyncio.run(asynchronous()), "mopd": own()})
