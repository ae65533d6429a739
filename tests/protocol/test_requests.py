"""A request has exactly one prompt and one completion, and no unknown field."""

from typing import Any

import pytest
from pydantic import ValidationError

from mopd_protocol.requests import ControlToken, LogprobsRequest, SequenceRequest
from mopd_protocol.samples import Message

PROMPTS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "?"}],
    "prompt": "3 + 4 =",
    "prompt_token_ids": [1, 2],
}
COMPLETIONS: dict[str, Any] = {"completion": "7", "completion_token_ids": [7]}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("completion", COMPLETIONS)
def test_one_prompt_and_one_completion_are_a_request(prompt, completion):
    fields = {prompt: PROMPTS[prompt], completion: COMPLETIONS[completion]}

    assert SequenceRequest(**fields).finished is False


def test_an_empty_prompt_and_an_empty_completion_are_given_ones():
    assert SequenceRequest(prompt="", completion="").completion == ""
    assert SequenceRequest(prompt_token_ids=[], completion_token_ids=[]).prompt_token_ids == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"completion": "7"}, "found no prompt; expected exactly one of messages, prompt"),
        (
            {"prompt": "?"},
            "found no completion; expected exactly one of completion, completion_tok",
        ),
        (
            {**PROMPTS, "completion": "7"},
            "found messages and prompt and prompt_token_ids; expected",
        ),
        ({"prompt": "?", **COMPLETIONS}, "found completion and completion_token_ids; expected"),
        ({"messages": [], "completion": "7"}, "messages"),
        ({"prompt_token_ids": [-1], "completion": "7"}, "prompt_token_ids"),
        ({"prompt": "?", "completion_token_ids": [-1]}, "completion_token_ids"),
        ({"prompt": "?", "completion": "7", "candidate_ids": [[-1]]}, "candidate_ids"),
        ({"prompt": "?", "completion": "7", "finnished": True}, "finnished"),
        ({"messages": [{"role": "user", "content": "?", "n": 1}], "completion": "7"}, "messages"),
    ],
)
def test_anything_else_is_refused_with_a_sentence(fields, message):
    with pytest.raises(ValidationError, match=message):
        SequenceRequest(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 0), ("temperature", 0.0), ("temperature", -1.0), ("logprobs_dtype", "float64")],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    sequence = SequenceRequest(prompt="?", completion="7")

    with pytest.raises(ValidationError, match=field):
        LogprobsRequest(sequences=[sequence], **{field: value})


def test_a_request_without_sequences_is_refused():
    with pytest.raises(ValidationError, match="sequences"):
        LogprobsRequest(sequences=[])


def test_a_request_reads_back_as_it_was_written():
    request = LogprobsRequest(
        sequences=[
            SequenceRequest(
                id="a",
                messages=[Message(role="user", content="?")],
                completion=["7", ControlToken(control="<think>"), "8"],
                finished=True,
                candidate_ids=[[1, 2], []],
            )
        ],
        top_k=3,
        temperature=0.5,
        logprobs_dtype="float16",
    )

    written = request.model_dump_json(exclude_none=True)

    assert LogprobsRequest.model_validate_json(written) == request


def test_the_documented_example_is_a_request():
    [example] = LogprobsRequest.model_json_schema()["examples"]

    assert LogprobsRequest.model_validate(example).top_k == 8
