"""The official openai client, and the request and the reading of slime's two functions."""

import asyncio
from typing import Any

import aiohttp
import openai
from job import finish, load_job

JOB = load_job()
SEQUENCES, LENGTHS = JOB["sequences"], JOB["prompt_lengths"]


def of_openai() -> list[list[dict[str, dict[str, Any]] | None]]:
    """Return ``prompt_logprobs`` of every prompt."""
    client = openai.OpenAI(base_url=JOB["url"] + "/v1", api_key="any")
    [model] = client.models.list().data
    completion = client.completions.create(
        model=model.id,
        prompt=SEQUENCES,
        max_tokens=1,
        temperature=1.0,
        extra_body={"prompt_logprobs": JOB["top_k"]},
    )
    return [choice.prompt_logprobs for choice in completion.choices]


def refused() -> dict[str, Any]:
    """Return what the client raises for a request to generate text."""
    client = openai.OpenAI(base_url=JOB["url"] + "/v1", api_key="any")
    try:
        client.completions.create(model="math", prompt="3 + 4 =", max_tokens=16)
    except openai.APIStatusError as error:
        return {"status": error.status_code, "text": str(error)}
    raise AssertionError("not refused")


async def of_slime() -> list[list[float]]:
    """Post as slime's ``reward_func``, and read as its ``post_process_rewards``."""
    rewards = []
    for ids in SEQUENCES:
        payload = {
            "input_ids": ids,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 0,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        url = JOB["url"] + "/generate"
        async with aiohttp.ClientSession() as session, session.post(url, json=payload) as response:
            response.raise_for_status()
            rewards.append(await response.json())
    logprobs = [
        [item[0] for item in reward["meta_info"]["input_token_logprobs"][1:]] for reward in rewards
    ]
    responses = [len(ids) - start for ids, start in zip(SEQUENCES, LENGTHS, strict=True)]
    return [values[-count:] for values, count in zip(logprobs, responses, strict=True)]


finish({"openai": of_openai(), "refused": refused(), "slime": asyncio.run(of_slime())})
