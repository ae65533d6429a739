"""One run: a warm student, one teacher, one loss, with its accuracy curve on held-out exercises.

Everything between prompt and optimizer step is the trainer's code. The teacher is the real service,
called by the real client in this process instead of over a socket.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.numerals.accuracy import accuracy
from bench.numerals.material import model_folder, model_key
from bench.numerals.pairs import SFT, Pair, loss_settings
from mopd.demo.examples import Encoder
from mopd.demo.tasks import Exercise
from mopd_client import TeacherClient, TeacherPool
from mopd_losses import Loss, ProjectionCache, SftLoss, build_loss
from mopd_protocol import Prompt, Rollout
from mopd_server import TeacherService, TeacherSettings, create_app
from mopd_trainer import (
    Learner,
    PromptOrder,
    RolloutConfig,
    RolloutScorer,
    Sampler,
    Student,
    StudentConfig,
    Teacher,
    TeacherConfig,
    collect,
    connect_teachers,
    pack,
)

Metrics = dict[str, float]

PROMPTS_PER_STEP = 64
_WARM_UP_STEPS = 20
_TEACHER = "teacher"
_ADDRESS = "http://teacher"

#: Progress callback: steps done, loss in nats per student token, last accuracy.
Report = Callable[[int, float, float], None]


@dataclass(frozen=True)
class Run:
    """Settings of one run."""

    pair: Pair
    loss: str
    seed: int
    """Seed of the student's weights, its warm start, its prompts and its samples."""
    evaluations: int
    """Number of evaluations over the run, besides one before the first step."""

    @property
    def name(self) -> str:
        """Name of the result file."""
        return f"{self.pair.name}-{self.loss}-seed{self.seed}-steps{self.pair.steps}"

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that determines the result, up to rounding, except the code."""
        pair = self.pair
        return {
            "models": [model_key(pair, "teacher", 0), model_key(pair, "student", self.seed)],
            "loss": loss_settings(self.loss).model_dump(mode="json"),
            "steps": pair.steps,
            "learning_rate": pair.learning_rate,
            "top_k": pair.top_k,
            "max_new_tokens": pair.max_new_tokens,
            "prompts_per_step": PROMPTS_PER_STEP,
            "evaluations": self.evaluations,
        }


def distil(run: Run, models: Path, report: Report) -> dict[str, Any]:
    """Run the distillation in this process; return the curve and the processor seconds."""
    return asyncio.run(_distil(run, models, report))


async def _distil(run: Run, models: Path, report: Report) -> dict[str, Any]:
    pair, started = run.pair, time.process_time()
    config = student_config(run, models)
    student = Student.load(config)
    encoder = Encoder(pair.student.tokenizer())
    held_out = pair.student.task.held_out()
    sampler, order = _sampling(run, student, encoder)
    cache = ProjectionCache()
    curve = [_point(0, await accuracy(student, held_out), {})]
    seconds = {"collect": 0.0, "update": 0.0}
    since: list[Metrics] = []
    first_loss = math.nan
    async with _teacher(run, student, models, cache) as (pool, teacher):
        scorer = RolloutScorer(pool, {_TEACHER: teacher}, student.table)
        learner = Learner(
            student,
            config,
            losses={_TEACHER: _loss(run.loss, student, teacher, cache)},
            teacher_weights={_TEACHER: 1.0},
            max_steps=pair.steps,
            seed=run.seed,
        )
        for step in range(pair.steps):
            begun = time.process_time()
            examples, _ = await collect(order.batch(step), sampler, scorer, step)
            collected = time.process_time()
            tokens = sum(len(example.rollout.completion) for example in examples)
            batches = pack(examples, tokens_per_micro_batch=config.tokens_per_micro_batch)
            updated, measured = learner.update(batches, tokens=tokens, step=step)
            seconds["collect"] += collected - begun
            seconds["update"] += time.process_time() - collected
            first_loss = updated["loss"] if step == 0 else first_loss
            since.append(updated | measured[_TEACHER].metrics())
            if _is_due(step + 1, run):
                share = await accuracy(student, held_out)
                curve.append(_point(step + 1, share, _means(since)))
                since = []
            report(step + 1, updated["loss"], curve[-1]["accuracy"])
    return {
        "pair": pair.name,
        "loss": run.loss,
        "seed": run.seed,
        "settings": run.settings,
        "accuracy": curve[-1]["accuracy"],
        "before": curve[0]["accuracy"],
        "first_loss": first_loss,
        "curve": curve,
        "processor_seconds": {**seconds, "total": time.process_time() - started},
    }


def student_config(run: Run, models: Path) -> StudentConfig:
    """Return the settings of the student and its optimizer, the same for every loss."""
    return StudentConfig(
        model=str(model_folder(run.pair, "student", run.seed, models)),
        device="cpu",
        learning_rate=run.pair.learning_rate,
        warmup_steps=min(_WARM_UP_STEPS, run.pair.steps),
        min_learning_rate_ratio=0.05,
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )


def _sampling(run: Run, student: Student, encoder: Encoder) -> tuple[Sampler, PromptOrder]:
    exercises = run.pair.student.task.training(run.seed)
    prompts = [
        Prompt(index=index, messages=exercise.messages, teachers={_TEACHER: 1.0})
        for index, exercise in enumerate(exercises)
    ]
    order = PromptOrder(prompts, prompts_per_step=PROMPTS_PER_STEP, seed=run.seed, shuffle=True)
    config = RolloutConfig(
        prompts_per_step=PROMPTS_PER_STEP,
        generation_batch_size=PROMPTS_PER_STEP,
        max_new_tokens=run.pair.max_new_tokens,
    )
    if run.loss == SFT:
        return ReferenceSampler(student, config, encoder, exercises), order
    return Sampler(student, config, seed=run.seed), order


class ReferenceSampler(Sampler):
    """Sampler that returns the reference answers as the student's completions."""

    def __init__(
        self,
        student: Student,
        config: RolloutConfig,
        encoder: Encoder,
        exercises: Sequence[Exercise],
    ) -> None:
        super().__init__(student, config, seed=0)
        self._own = student
        self._reference_encoder = encoder
        self._exercises = exercises

    def sample_batch(self, prompts: Sequence[Prompt], *, step: int, batch: int) -> list[Rollout]:
        """See ``Sampler``."""
        del batch
        completions = [
            self._reference_encoder.completion(self._exercises[prompt.index]) for prompt in prompts
        ]
        return [
            Rollout(
                prompt=prompt,
                prompt_token_ids=np.array(
                    self._own.prompt_token_ids(prompt.messages), dtype=np.int32
                ),
                completion=self._own.table.sequence(completion),
                sampled_logprobs=np.zeros(len(completion), dtype=np.float32),
                finish_reason="stop",
                policy_version=step,
            )
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


@asynccontextmanager
async def _teacher(
    run: Run, student: Student, models: Path, cache: ProjectionCache
) -> AsyncGenerator[tuple[TeacherPool, Teacher]]:
    folder = model_folder(run.pair, "teacher", 0, models)
    service = TeacherService.load(TeacherSettings(model=str(folder), name=_TEACHER, device="cpu"))
    await asyncio.to_thread(service.warm_up)  # it runs an event loop
    config = TeacherConfig(url=(_ADDRESS,), top_k=run.pair.top_k, loss=loss_settings(run.loss))
    transport = httpx.ASGITransport(create_app(service))
    client = TeacherClient(_TEACHER, config.url, transport=transport)
    async with TeacherPool({_TEACHER: client}) as pool:
        teachers = await connect_teachers(
            pool, {_TEACHER: config}, student.identity, cache, {}, wait_seconds=60.0
        )
        yield pool, teachers[_TEACHER]


def _loss(name: str, student: Student, teacher: Teacher, cache: ProjectionCache) -> Loss:
    if name == SFT:
        return SftLoss()
    sides = student.identity, teacher.tokenizer
    return build_loss(teacher.config.loss, *sides, student.device, cache=cache)


def _is_due(steps_done: int, run: Run) -> bool:
    """Return whether to evaluate: evenly over the run and always at the end."""
    steps = run.pair.steps
    return steps_done * run.evaluations // steps > (steps_done - 1) * run.evaluations // steps


def _point(step: int, share: float, metrics: Metrics) -> dict[str, Any]:
    return {"step": step, "accuracy": share, **metrics}


def _means(metrics: Sequence[Metrics]) -> Metrics:
    names = metrics[0] if metrics else {}
    means = {name: math.fsum(m[name] for m in metrics) / len(metrics) for name in names}
    return {name: value for name, value in means.items() if math.isfinite(value)}
