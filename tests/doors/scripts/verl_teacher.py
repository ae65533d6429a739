"""verl's teacher manager and its losses, with mopd's client and losses."""

import asyncio
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl
from job import finish, load_job
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.experimental import teacher_loop
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils.config import omega_conf_to_dataclass

from mopd_protocol import ConfigError, TopKLogprobs

JOB = load_job()
SETTINGS = Path(verl.__file__).parent / "trainer" / "config" / "distillation" / "distillation.yaml"


def configuration(mode: str, overrides: list[str]) -> DictConfig:
    """Return verl's own defaults, with overrides as on verl's command line."""
    rollout = {"name": "vllm", "dtype": "bfloat16", "temperature": 1.0}
    rollout |= {"prompt_length": 64, "response_length": 64}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    config.distillation = OmegaConf.load(SETTINGS)
    del config.distillation["defaults"]
    mode_override = f"distillation.distillation_loss.loss_mode={mode}"
    return OmegaConf.merge(config, OmegaConf.from_dotlist([*overrides, mode_override]))


async def scores(mode: str) -> list[Any]:
    """Return ids and log-probabilities of every sequence, from verl's own manager."""
    config = configuration(mode, JOB["overrides"])
    manager = teacher_loop.MultiTeacherModelManager(config=config, resource_pool=None)
    clients = pickle.loads(pickle.dumps(manager.get_client()))  # as to another process
    own = AsyncTeacherLLMServerManager(config, clients)
    rows = [await own.compute_teacher_logprobs_single(ids) for ids in JOB["sequences"]]
    return [[ids.tolist(), logprobs.tolist()] for ids, logprobs in rows]


def loss(mode: str, ids: list[Any], logprobs: list[Any], strategy: str = "fsdp") -> Any:
    """Return the loss and the gradient of the logits, by both stages of verl's loss."""
    distillation = omega_conf_to_dataclass(configuration(mode, JOB["overrides"]).distillation)
    actor: Any = SimpleNamespace(
        strategy=strategy, loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None
    )
    logits = [torch.tensor(rows, requires_grad=True, dtype=torch.float32) for rows in JOB["logits"]]
    lengths = [len(rows) for rows in logits]

    def nested(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    starts = JOB["prompt_lengths"]
    sequences = [torch.tensor(sequence) for sequence in JOB["sequences"]]
    data = TensorDict(
        {
            "teacher_ids": nested([torch.tensor(rows, dtype=torch.int32) for rows in ids]),
            "teacher_logprobs": nested([torch.tensor(rows) for rows in logprobs]),
            "prompts": nested([s[:n] for s, n in zip(sequences, starts, strict=True)]),
            "responses": nested([s[n:] for s, n in zip(sequences, starts, strict=True)]),
            "response_mask": nested(
                [torch.ones(len(s) - n) for s, n in zip(sequences, starts, strict=True)]
            ),
        },
        batch_size=[len(sequences)],
    )
    tokens = sum(len(s) - n for s, n in zip(sequences, starts, strict=True))
    for name, value in (("dp_size", 1), ("batch_num_tokens", tokens), ("global_batch_size", 4)):
        data.set_non_tensor(name, value)
    outputs = distillation_ppo_loss(
        actor, distillation, data=data, student_logits=torch.cat(logits).unsqueeze(0)
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    output = {
        name: torch.nested.nested_tensor_from_jagged(value.squeeze(0), offsets)
        for name, value in outputs.items()
    }
    value, metrics = distillation_ppo_loss(actor, distillation, model_output=output, data=data)
    value.backward()
    return {
        "loss": value.item(),
        "gradients": [rows.grad.tolist() for rows in logits],
        "teacher_mass": float(metrics["distillation/teacher_mass"]),
    }


async def errors(mode: str) -> dict[str, Any]:
    """Return what a client of this loss sends as its name, and its error about a missing entry."""
    topk = TopKLogprobs([[3, -1]], [[-0.5, -np.inf]], [-0.5], [-0.9])

    async def shorter(*arguments: Any, **settings: Any) -> list[TopKLogprobs]:
        return [topk]

    config = configuration(mode, JOB["overrides"])
    client = teacher_loop.MultiTeacherModelManager(config, None).get_client()["default"]
    client._scorer = SimpleNamespace(score=shorter)
    params = {"prompt_logprobs": 0 if client._loss == "token" else 2, "temperature": 1.0}
    try:
        await client.generate("1", prompt_ids=[1, 3], sampling_params=params)
    except ConfigError as error:
        return {"loss": client._loss, "key": error.key}
    return {"loss": client._loss, "key": None}


modes = ["forward_kl_tail", "reverse_kl_tail", "forward_kl_topk", "k3"]
results: dict[str, Any] = {"scores": {mode: asyncio.run(scores(mode)) for mode in modes}}
ids, logprobs = zip(*results["scores"]["forward_kl_tail"], strict=True)
results["losses"] = {mode: loss(mode, ids, logprobs) for mode in modes[:2]}
# One entry of every row missing, as a translating service may leave it.
shorter = [[[*row[:-1], float("-inf")] for row in rows] for rows in logprobs]
results["losses"]["missing"] = loss("forward_kl_tail", ids, shorter)
results["errors"] = {mode: asyncio.run(errors(mode)) for mode in modes}
finish(results)
