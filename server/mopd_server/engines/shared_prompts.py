"""Hidden states of several completions of one prompt, which is computed once."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mopd_server.engines.base import ScoringTask

#: Shorter prompts are batched as parts of their sequences.
_MIN_PROMPT_TOKENS = 32


def groups_of_prompts(tasks: Sequence[ScoringTask], max_tokens: int) -> list[list[int]]:
    """Return the indices of tasks with equal prompts, two or more of each.

    A group has at most ``max_tokens`` tokens with its padding, prompts counted for every task:
    that is the size of its key-value cache. Tasks without a group are not contained.
    """
    by_prompt: dict[bytes, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        if len(task.prompt_ids) >= _MIN_PROMPT_TOKENS:
            by_prompt[task.prompt_ids.tobytes()].append(index)
    groups: list[list[int]] = []
    for members in by_prompt.values():
        members.sort(key=lambda index: len(tasks[index].completion_ids), reverse=True)
        longest = max(tasks[index].tokens for index in members)
        size = max_tokens // longest
        if size > 1:
            parts = [members[start : start + size] for start in range(0, len(members), size)]
            groups += [part for part in parts if len(part) > 1]
    return groups


def hidden_rows(model: PreTrainedModel, tasks: Sequence[ScoringTask]) -> Tensor:
    """Return the hidden states ``[rows, hidden]`` that predict the completions' tokens.

    Args:
        model: with a cache (``supports_shared_prompts``).
        tasks: with equal prompts and non-empty completions.
    """
    device = model.device
    prompt = torch.from_numpy(tasks[0].prompt_ids.astype(np.int64)).to(device)[None]
    output = model.base_model(prompt, use_cache=True)
    last = output.last_hidden_state[:, -1]
    lengths = [len(task.completion_ids) - 1 for task in tasks]  # the last token is predicted only
    if not max(lengths):
        return last.expand(len(tasks), -1)
    cache = output.past_key_values
    cache.batch_repeat_interleave(len(tasks))
    inputs = np.zeros((len(tasks), max(lengths)), dtype=np.int64)  # padded with id 0, masked
    mask = np.ones((len(tasks), prompt.shape[1] + max(lengths)), dtype=np.int64)
    for row, (task, length) in enumerate(zip(tasks, lengths, strict=True)):
        inputs[row, :length] = task.completion_ids[:-1]
        mask[row, prompt.shape[1] + length :] = 0
    hidden = model.base_model(
        torch.from_numpy(inputs).to(device),
        attention_mask=torch.from_numpy(mask).to(device),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    rows = [part for row, length in enumerate(lengths) for part in (last, hidden[row, :length])]
    return torch.cat(rows)


@torch.inference_mode()
def supports_shared_prompts(model: PreTrainedModel, ids: Tensor) -> bool:
    """Return whether the model has a cache of keys and values, whose use does not affect results.

    Args:
        model: a decoder whose last hidden states are the inputs of the head.
        ids: ``[1, tokens]``, a probe.
    """
    output = model.base_model(ids, use_cache=True)
    if not isinstance(getattr(output, "past_key_values", None), DynamicCache):
        return False
    tokens = ids[0].cpu().numpy().astype(np.int32)
    half = len(tokens) // 2
    tasks = [ScoringTask(tokens[:half], tokens[half:end]) for end in (len(tokens), len(tokens) - 1)]
    expected = [output.last_hidden_state[0, half - 1 : end] for end in (-1, -2)]
    # Kernels may round differently.
    return torch.allclose(
        hidden_rows(model, tasks).float(), torch.cat(expected).float(), rtol=1e-2, atol=1e-3
    )
