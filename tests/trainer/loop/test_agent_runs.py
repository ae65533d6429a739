"""Runs with an agent: every turn is scored behind its conversation, recorded, and replayed."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mopd_protocol.messages import Message
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.prompts import read_prompts
from mopd_trainer.rollouts.agents.sampler import AgentClient
from mopd_trainer.run_folder.recordings.recording import Recording
from mopd_trainer.student.identity import StudentIdentity
from tests import tiny_models
from tests.server.tiny_teachers import teacher_of
from tests.tool_templates import CALCULATOR, tool_tokenizer
from tests.trainer.in_process import Recorded, serve_in_process
from tests.trainer.runs import run_values, write_lines
from tests.trainer.whole_runs import assert_same_weights, journal, run_here

MODULE = "agent_of_a_run"
CALL = {
    "id": "abcdefghi",
    "function": {"name": "calculator", "arguments": {"expression": "ENVIRONMENT"}},
}


async def agent(prompt: Prompt, client: AgentClient) -> None:
    """Take any completion, call the tool in the student's name, and continue."""
    await client.chat([*prompt.messages], prompt.tools)
    call = Message.model_validate({"role": "assistant", "tool_calls": [CALL]})
    result = {"role": "tool", "content": "ENVIRONMENT", "tool_call_id": "abcdefghi"}
    await client.chat([*prompt.messages, call, result], prompt.tools)


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = ModuleType(MODULE)
    module.agent = agent  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, MODULE, module)
    tokenizer = tool_tokenizer("qwen_3")
    model = tiny_models.qwen(tokenizer)
    model.config.max_position_embeddings = 2048
    tiny_models.save(model, tokenizer, tmp_path / "student")
    lines = [
        {"messages": [{"role": "user", "content": f"{n}?"}], "tools": [CALCULATOR]}
        for n in range(4)
    ]
    write_lines(tmp_path / "prompts.jsonl", lines)
    values = run_values(tmp_path)
    values["rollout"] |= {"agent": f"python:{MODULE}:agent", "prompts_per_step": 2}
    values["teachers"] = {"math": {"url": "http://teacher", "top_k": 8, "loss": {"type": "ctkd"}}}
    values["logging"] = {"tensorboard": False, "record": True, "completions": 8}
    return values


def test_turns_are_scored_behind_their_conversation_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    tokenizer = tool_tokenizer("llama_3_1")
    model = tiny_models.llama(tokenizer)
    model.config.max_position_embeddings = 2048
    transport = Recorded(teacher_of(model, tokenizer, max_model_len=2048).app)
    serve_in_process(monkeypatch, {"math": transport})
    folder, console = run_here(values)
    assert f"at most 16 turns with python:{MODULE}:agent" in console
    assert "at most 32 completions" in console

    assert len(transport.sequences) == 8  # two steps of two trajectories with two turns
    turns = sorted(len(each["messages"]) for each in transport.sequences)
    assert turns == [1, 1, 1, 1, 3, 3, 3, 3]
    for sent in transport.sequences:
        assert sent["tools"] == [CALCULATOR]
        assert "ENVIRONMENT" not in json.dumps(sent.get("completion", ""))
        if len(sent["messages"]) == 3:
            assert sent["messages"][1]["tool_calls"][0]["function"] == CALL["function"]

    output = Path(values["output_dir"])
    config = RunConfig.model_validate(values)
    prompts = read_prompts(config.data, config.teachers)
    student = StudentIdentity.read(config.student)
    samples = Recording(output).read(1, prompts, student.table)
    assert [(s.rollout.sample, s.rollout.turn) for s in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for sample in samples:
        rollout = sample.rollout
        prompt = rollout.prompt
        assert prompt.tools == (CALCULATOR,)
        ids = student.prompt_token_ids(prompt.messages, prompt.tools)
        assert rollout.prompt_token_ids.tolist() == ids
        assert b"ENVIRONMENT" not in rollout.completion.text
    logged = [json.loads(line) for line in (output / "completions.jsonl").open()]
    assert {(line["sample"], line["turn"]) for line in logged if line["step"] == 1} == {
        (0, 0), (0, 1), (1, 0), (1, 1),
    }  # fmt: skip
    assert "calculator" in json.dumps(logged[1]["prompt"])
    assert len(journal(output)) == 2

    again = {**values, "output_dir": str(tmp_path / "replay"), "replay": str(output)}
    again["logging"] = {"tensorboard": False}
    replayed, _ = run_here(again)
    assert_same_weights(folder, replayed)
