"""The losses inside a transformers ``Trainer``: its optimizer, schedule, logging and checkpoints.

`compute_loss` samples a completion for each prompt of the batch, requests the teachers' scores, and
returns the mean loss of the batch's tokens. One process, one device; `mopd train` does more.

    python cookbook/hf_trainer.py STUDENT NAME=URL [NAME=URL ...] --max-steps 10
"""

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainingArguments

from mopd_losses import LossTerm, ProjectionCache, build_loss
from mopd_protocol import Message, Prompt
from mopd_trainer import (
    RolloutConfig,
    RolloutScorer,
    Sampler,
    Student,
    StudentConfig,
    TeacherConfig,
    connect_teachers,
    micro_batch,
    teacher_pool,
)

EXERCISES = ["12 + 30 =", "7 + 8 =", "201 + 45 =", "99 + 1 ="]


class DistillationTrainer(Trainer):
    """A ``Trainer`` whose loss compares student and teachers on the student's completions."""

    def __init__(self, student: Student, teachers: dict[str, TeacherConfig], **settings: Any):
        super().__init__(model=student.model, **settings)
        self.student = student
        self.sampler = Sampler(student, RolloutConfig(max_new_tokens=24), seed=self.args.seed)
        self.runner = asyncio.Runner()  # one event loop for all steps: the pool belongs to it
        self.pool = teacher_pool(teachers)
        cache = ProjectionCache()
        connected = self.runner.run(
            connect_teachers(self.pool, teachers, student.identity, cache, {}, wait_seconds=60.0)
        )
        self.scorer = RolloutScorer(self.pool, connected, student.table)
        self.losses = {
            name: build_loss(
                teacher.config.loss,
                student.identity,
                teacher.tokenizer,
                student.device,
                cache=cache,
            )
            for name, teacher in connected.items()
        }

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss in nats per token, averaged over the tokens of this batch."""
        model.eval()  # sampling without dropout
        rollouts = self.sampler.sample_batch(
            inputs["prompts"], step=self.state.global_step, batch=0
        )
        model.train()
        examples = self.runner.run(self.scorer.score(rollouts))
        batch = micro_batch(examples)
        terms = [
            LossTerm(
                self.losses[name],
                self.losses[name]
                .targets(part.comparisons, part.slot_offsets)
                .to(self.student.device),
                part.slot_weights.to(self.student.device) / batch.slots,
            )
            for name, part in batch.teachers.items()
        ]
        total: Tensor = self.student.losses(batch, terms, rows_per_block=1024)[0]
        return (total, {}) if return_outputs else total

    def close(self) -> None:
        """Close the connections to the teachers."""
        self.runner.run(self.pool.aclose())
        self.runner.close()


def collate(lines: Sequence[dict[str, Prompt]]) -> dict[str, list[Prompt]]:
    """Return the prompts of a batch; padding follows after sampling."""
    return {"prompts": [line["prompt"] for line in lines]}


def main(arguments: Sequence[str] | None = None) -> DistillationTrainer:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="On-policy distillation in a Trainer.")
    parser.add_argument("student", help="a Hugging Face model folder")
    parser.add_argument("teachers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--max-steps", type=int, default=10)
    parser.add_argument("--output-dir", default="runs/hf-trainer")
    options = parser.parse_args(arguments)
    teachers = {
        name: TeacherConfig.model_validate({"url": url, "top_k": 32})
        for name, url in (teacher.split("=", 1) for teacher in options.teachers)
    }
    prompts = [
        Prompt(at, (Message(role="user", content=exercise),), dict.fromkeys(teachers, 1.0))
        for at, exercise in enumerate(EXERCISES)
    ]
    student = Student.load(StudentConfig(model=options.student))
    trainer = DistillationTrainer(
        student,
        teachers,
        args=TrainingArguments(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            remove_unused_columns=False,
            use_cpu=student.device.type == "cpu",
        ),
        train_dataset=[{"prompt": prompt} for prompt in prompts],
        data_collator=collate,
    )
    trainer.train()
    trainer.close()
    return trainer


if __name__ == "__main__":
    main()
