"""One run of a TRL trainer, in an environment with TRL: ``python trl_training.py JOB``.

The job has the optimizer and the learning rate of every step, so that both are those of mopd.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

from mopd.integrations.trl import ServiceLoss, TeacherService, install_client


class ServiceLossTrainer(ServiceLoss, DistillationTrainer):
    """TRL's stable trainer, with a service instead of a teacher in its process."""


def main(job: dict[str, Any]) -> None:
    """Train, and save the student every ``save_steps``."""
    torch.set_num_threads(1)
    rates: list[float] = job["learning_rates"]
    settings: dict[str, Any] = {
        "output_dir": job["output_dir"],
        "max_steps": len(rates),
        "per_device_train_batch_size": job["completions_per_step"],
        "max_completion_length": job["max_new_tokens"],
        "temperature": job["temperature"],
        "max_grad_norm": job["max_grad_norm"],
        "beta": 0.0,
        "save_strategy": "steps",
        "save_steps": job["save_steps"],
        "save_only_model": True,
        "logging_steps": job["save_steps"],
        "seed": job["seed"],
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    student = AutoModelForCausalLM.from_pretrained(job["student"], dtype=torch.float32)
    optimizer = AdamW(
        student.parameters(), lr=1.0, betas=tuple(job["betas"]), weight_decay=job["weight_decay"]
    )
    schedule = LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)])
    lines = Path(job["prompts"]).read_text().splitlines()
    common: dict[str, Any] = {
        "model": student,
        "train_dataset": Dataset.from_list([{"prompt": json.loads(x)["messages"]} for x in lines]),
        "processing_class": AutoTokenizer.from_pretrained(job["student"]),
        "optimizers": (optimizer, schedule),
    }
    if job["trainer"] == "server":
        install_client()
        server = {"teacher_model_server_url": job["url"], "loss_top_k": job["top_k"]}
        ServerDistillationTrainer(
            args=ServerDistillationConfig(**settings, **server), **common
        ).train()
        return
    ServiceLoss.teacher = TeacherService(job["url"], top_k=job["top_k"])
    ServiceLossTrainer(args=DistillationConfig(**settings), **common).train()
    ServiceLoss.teacher.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
