"""Steps of TRL's trainers on a tiny student: losses by trainer."""

from typing import Any

import torch
from datasets import Dataset
from job import finish, load_job
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer
from trl.experimental.server_distillation import (
    ServerDistillationConfig,
    ServerDistillationTrainer,
)
from trl.generation import vllm_client

from mopd.integrations.trl import ServiceLoss, TeacherService, install_client

JOB = load_job()
SETTINGS: dict[str, Any] = {
    "output_dir": "out",
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "seed": 0,
}
PROMPTS = Dataset.from_list([{"prompt": prompt} for prompt in JOB["prompts"]])
COMPLETIONS = Dataset.from_list(
    [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": "7, 42"}]}
        for prompt in JOB["prompts"]
    ]
)
SAMPLED = {"max_completion_length": 12, "temperature": 1.0}


class Distillation(ServiceLoss, DistillationTrainer):
    """TRL's stable trainer, whose own teacher is a model in the process."""


class SupervisedPrompts(ServiceLoss, SFTTrainer):
    """TRL's trainer on completions of a data set."""


def steps(kind: Any, config: Any, data: Dataset = PROMPTS) -> list[float]:
    """Return the losses of three steps, and check that the last weights are other ones."""
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_pretrained(JOB["student"])
    before = [parameter.detach().clone() for parameter in student.parameters()]
    trainer = kind(model=student, args=config, train_dataset=data, processing_class=TOKENIZER)
    trainer.train()
    changed = zip(before, student.parameters(), strict=True)
    assert any(not torch.equal(old, new.detach()) for old, new in changed)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


from transformers import AutoTokenizer  # noqa: E402

TOKENIZER = AutoTokenizer.from_pretrained(JOB["student"])
SERVER = {"teacher_model_server_url": JOB["url"], "loss_top_k": JOB["top_k"], "beta": 0.0}
results: dict[str, list[float]] = {}
vllm_client.is_vllm_available = lambda: True
server_config = ServerDistillationConfig(**SETTINGS, **SAMPLED, **SERVER)
results["server"] = steps(ServerDistillationTrainer, server_config)
vllm_client.is_vllm_available = lambda: False
install_client()
results["server_mopd"] = steps(ServerDistillationTrainer, server_config)
ServiceLoss.teacher = TeacherService(JOB["url"], top_k=JOB["top_k"])
for name, beta in (("forward", 0.0), ("jsd", 0.5), ("reverse", 1.0)):
    results[name] = steps(Distillation, DistillationConfig(**SETTINGS, **SAMPLED, beta=beta))
accumulated = {**SETTINGS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
results["accumulated"] = steps(Distillation, DistillationConfig(**accumulated, **SAMPLED, beta=0.0))
results["supervised"] = steps(
    SupervisedPrompts, SFTConfig(**SETTINGS, completion_only_loss=True), COMPLETIONS
)
ServiceLoss.teacher.close()
finish(results)
