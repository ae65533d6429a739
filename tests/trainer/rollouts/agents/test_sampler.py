"""The user's agent in a step: order, determinism, failures, and the address of the student."""

import asyncio
import sys
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest

from mopd_protocol.errors import ConfigError, TrainingError
from mopd_protocol.messages import Message
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.agents.sampler import Agent, AgentClient, AgentSampler
from mopd_trainer.rollouts.agents.standalone import serve_student
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.tool_templates import CALCULATOR, tool_tokenizer
from tests.trainer.rollouts.agents.scripted_student import ScriptedGenerator
from tests.trainer.rollouts.agents.test_session import COMPLETIONS, USER
from tests.trainer.rollouts.test_reference_turns import student
from tests.trainer.students import CPU

PROMPTS = [
    Prompt(index=n, messages=(Message(role="user", content=f"{n}?"),), teachers={"math": 1.0})
    for n in range(3)
]
MODULE = "agent_of_the_tests"


def settings_of(
    monkeypatch: pytest.MonkeyPatch,
    agent: Agent,
    section: dict[str, Any] | None = None,
    **fields: Any,
) -> RolloutConfig:
    module = ModuleType(MODULE)
    module.agent = agent  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, MODULE, module)
    settings = {"function": f"python:{MODULE}:agent", **(section or {})}
    return RolloutConfig.model_validate({"max_new_tokens": 6, "agent": settings, **fields})


async def collected(sampler: AgentSampler, prompts: list[Prompt]) -> list[Rollout]:
    batches = [batch async for batch in sampler.sample(prompts, step=2)]
    ordered = sorted(batches, key=lambda batch: batch.place)
    return [rollout for batch in ordered for rollout in batch.rollouts]


async def until_no_call(prompt: Prompt, client: AgentClient) -> None:
    """Call the tool until the student makes no call."""
    messages: list[Message | dict[str, Any]] = [*prompt.messages]
    while True:
        reply = await client.chat(messages, [CALCULATOR])
        messages.append(reply)
        if not reply.tool_calls:
            return
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "518"})


def test_a_step_of_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    call, ending = COMPLETIONS["qwen_3"]
    config = settings_of(monkeypatch, until_no_call, samples_per_prompt=2)
    assert config.corrections == 0
    # The second of six trajectories ends in the first round.
    generator = ScriptedGenerator(student("qwen_3"), [call, ending, *[call] * 4, *[ending] * 5])

    async def run() -> list[Rollout]:
        sampler = AgentSampler(generator, student("qwen_3"), config, seed=0, version=1)
        await sampler.push_weights(4)
        return await collected(sampler, PROMPTS)

    rollouts = asyncio.run(run())
    assert generator.batches == [6, 5]
    assert generator.version == 4
    assert [(r.sample, r.turn) for r in rollouts] == [
        (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1),
    ]  # fmt: skip
    assert [r.prompt.index for r in rollouts] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert {r.policy_version for r in rollouts} == {4}
    assert {r.source for r in rollouts} == {"rollout"}


def test_samples_do_not_depend_on_the_time_that_tools_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tool_tokenizer("qwen_3")
    model = tiny_models.qwen(tokenizer)

    def run(delays: list[int]) -> list[Rollout]:
        async def agent(prompt: Prompt, client: AgentClient) -> None:
            messages: list[Message | dict[str, Any]] = [*prompt.messages]
            for _ in range(3 if prompt.index else 2):
                messages.append(await client.chat(messages))
                for _ in range(delays[prompt.index]):
                    await asyncio.sleep(0)
                messages.append({"role": "tool", "content": "no"})

        config = settings_of(monkeypatch, agent, temperature=1.0)
        own = Student(model, tokenizer, CPU)
        sampler = AgentSampler(Sampler(own, config, seed=1), own.identity, config, seed=1)
        return asyncio.run(collected(sampler, PROMPTS))

    first, second = run([0, 5, 30]), run([40, 0, 3])
    assert len(first) == len(second) == 8
    for left, right in zip(first, second, strict=True):
        assert np.array_equal(left.prompt_token_ids, right.prompt_token_ids)
        assert np.array_equal(left.completion.token_ids, right.completion.token_ids)
        assert left.sampled_logprobs is not None
        assert right.sampled_logprobs is not None
        assert np.array_equal(left.sampled_logprobs, right.sampled_logprobs)
    assert len({r.completion.token_ids.tobytes() for r in first}) > 4


@pytest.mark.parametrize("on_error", ["fail", "drop"])
def test_failing_agent(monkeypatch: pytest.MonkeyPatch, on_error: str) -> None:
    async def agent(prompt: Prompt, client: AgentClient) -> None:
        await client.chat([*prompt.messages])
        if prompt.index == 1:
            raise KeyError("tool")

    config = settings_of(monkeypatch, agent, {"on_error": on_error})
    generator = ScriptedGenerator(student("qwen_3"), ["a<|im_end|>"] * 3)
    sampler = AgentSampler(generator, student("qwen_3"), config, seed=0)
    if on_error == "fail":
        with pytest.raises(TrainingError) as caught:
            asyncio.run(collected(sampler, PROMPTS))
        assert caught.value.key == "rollout.agent"
        return
    assert [r.prompt.index for r in asyncio.run(collected(sampler, PROMPTS))] == [0, 2]
    assert sampler.pop_dropped() == {"agent_failed": 1}
    assert sampler.pop_dropped() == {}


def test_limits_keep_the_turns_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(prompt: Prompt, client: AgentClient) -> None:
        while True:
            await client.chat([*prompt.messages])

    async def silent(prompt: Prompt, client: AgentClient) -> None:
        pass

    config = settings_of(monkeypatch, agent, {"max_turns": 2})
    generator = ScriptedGenerator(student("qwen_3"), ["a<|im_end|>"] * 6)
    sampler = AgentSampler(generator, student("qwen_3"), config, seed=0)
    assert len(asyncio.run(collected(sampler, PROMPTS))) == 6
    sampler = AgentSampler(generator, student("qwen_3"), settings_of(monkeypatch, silent), seed=0)
    assert asyncio.run(collected(sampler, PROMPTS)) == []
    assert sampler.pop_dropped() == {"no_turn": 3}


def test_failure_of_the_sampler_is_not_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    class Diverged(ScriptedGenerator):
        async def generate(self, *values: Any, **options: Any) -> Any:
            raise TrainingError("not finite", key="student.learning_rate")

    async def agent(prompt: Prompt, client: AgentClient) -> None:
        try:
            await client.chat([*prompt.messages])
        except TrainingError as error:
            raise ValueError("swallowed") from error

    config = settings_of(monkeypatch, agent, {"on_error": "drop"})
    sampler = AgentSampler(Diverged(student("qwen_3"), []), student("qwen_3"), config, seed=0)
    with pytest.raises(TrainingError) as caught:
        asyncio.run(collected(sampler, PROMPTS))
    assert caught.value.key == "student.learning_rate"


@pytest.mark.parametrize(
    "name", ["python:no_such_module:f", "python:json:missing", "python:json:dumps"]
)
def test_agent_that_cannot_be_imported(name: str) -> None:
    config = RolloutConfig.model_validate({"max_new_tokens": 6, "agent": name})
    with pytest.raises(ConfigError) as caught:
        AgentSampler(ScriptedGenerator(student("qwen_3"), []), student("qwen_3"), config, seed=0)
    assert caught.value.key == "rollout.agent"


@pytest.mark.parametrize(
    "fields", [{"agent": "module.function"}, {"agent": "python:m:f", "corrections": 1}]
)
def test_invalid_settings(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"agent|corrections"):
        RolloutConfig.model_validate({"max_new_tokens": 6, **fields})


def test_address_of_the_student(monkeypatch: pytest.MonkeyPatch) -> None:
    responses: dict[str, httpx.Response] = {}

    async def agent(prompt: Prompt, client: AgentClient) -> None:
        async with httpx.AsyncClient(base_url=client.base_url) as http:
            path = "/chat/completions"
            parts = [{"type": "text", "text": "37*14?"}]
            body: dict[str, Any] = {
                "model": "any",
                "temperature": 0.1,
                "messages": [{**USER, "content": parts}],
                "tools": [CALCULATOR],
            }
            first = await http.post(path, json=body)
            message = first.json()["choices"][0]["message"]
            result = {"role": "tool", "content": "518", "tool_call_id": "x"}
            body["messages"] = [*body["messages"], {**message, "refusal": None}, result]
            responses["second"] = await http.post(path, json=body)
            responses["first"] = first
            responses["stream"] = await http.post(path, json={**body, "stream": True})
            responses["messages"] = await http.post(path, json={"messages": [{"role": "user"}]})
            responses["text"] = await http.post(path, content="{}")
            responses["unknown"] = await http.post(client.base_url + "x" + path, json=body)
            responses["models"] = await http.get("/models")

    call, ending = COMPLETIONS["qwen_3"]
    config = settings_of(monkeypatch, agent)
    generator = ScriptedGenerator(student("qwen_3"), [call, ending])
    sampler = AgentSampler(generator, student("qwen_3"), config, seed=0)
    first, second = asyncio.run(collected(sampler, PROMPTS[:1]))
    codes = {name: response.status_code for name, response in responses.items()}
    assert codes == {
        "first": 200, "second": 200, "models": 200, "stream": 400, "messages": 400, "text": 415,
        "unknown": 404,
    }  # fmt: skip
    choice = responses["first"].json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [called] = choice["message"]["tool_calls"]
    assert called["function"] == {"name": "calculator", "arguments": '{"expression":"37*14"}'}
    last = responses["second"].json()
    assert last["choices"][0]["message"] == {
        "role": "assistant",
        "content": "518",
        "reasoning_content": "ok",
    }
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["prompt_tokens"] == len(second.prompt_token_ids)
    before = [*first.prompt_token_ids.tolist(), *first.completion.token_ids.tolist()]
    assert second.prompt_token_ids.tolist()[: len(before)] == before


def test_student_outside_a_run() -> None:
    tokenizer = tool_tokenizer("qwen_3")
    own = Student(tiny_models.qwen(tokenizer), tokenizer, CPU)
    config = RolloutConfig(max_new_tokens=6)

    async def run() -> list[httpx.Response]:
        addresses: asyncio.Queue[str] = asyncio.Queue()
        serving = asyncio.create_task(
            serve_student(own, config, host="127.0.0.1", port=0, announce=addresses.put_nowait)
        )
        async with httpx.AsyncClient(base_url=await addresses.get()) as http:
            body = {"messages": [USER]}
            responses = await asyncio.gather(
                *[http.post("/chat/completions", json=body) for _ in range(3)]
            )
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return responses

    responses = asyncio.run(run())
    assert [response.status_code for response in responses] == [200] * 3
    assert {response.json()["usage"]["prompt_tokens"] for response in responses} == {
        len(own.prompt_token_ids([Message(role="user", content="37*14?")]))
    }
    assert all(0 < r.json()["usage"]["completion_tokens"] <= 6 for r in responses)
