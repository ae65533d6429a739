"""One run: a warm student, its teachers, one loss, with accuracy curves on held-out exercises.

Everything between prompt and optimizer step is the trainer's code. A teacher is the real service,
called by the real client in this process instead of over a socket.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.numerals.accuracy import accuracy
from bench.numerals.material import Role, model_folder, model_key
from bench.numerals.pairs import PKL_PARITY, SFT, Pair, Side, loss_settings
from bench.numerals.reference_rollouts import reference_rollouts
from bench.xtoken import PklParityLoss
from mopd.demo.examples import Encoder
from mopd.demo.tasks import Exercise
from mopd_client import TeacherClient, TeacherPool
from mopd_losses import Loss, ProjectionCache, SftLoss, build_loss
from mopd_protocol import Prompt, Rollout, TrainingError, replacing_folder
from mopd_server import TeacherService, TeacherSettings, create_app
from mopd_trainer import (
    Corrector,
    DegradationConfig,
    DegradationMonitor,
    ImportanceConfig,
    ImportanceWeights,
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
    sample_metrics,
)

Metrics = dict[str, float]

#: Name in a result -> metric of a step.
_MEASURED = {
    "loss": "loss",
    "compared_share": "compared_share",
    "invalid_byte_share": "rollout/invalid_byte_share",
}

PROMPTS_PER_STEP = 64
_WARM_UP_STEPS = 20
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
        pair = self.pair
        name = f"{pair.name}-{self.loss}-seed{self.seed}-steps{pair.steps}"
        if pair.temperature is not None:
            name += f"-temperature{pair.temperature:g}"
        if pair.teacher_temperature is not None:
            name += f"-teacher{pair.teacher_temperature:g}"
        if pair.importance.least_weight != ImportanceConfig().least_weight:
            name += f"-least{pair.importance.least_weight:g}"
        if self.corrections:
            name += f"-corrections{self.corrections}"
        return name

    @property
    def corrections(self) -> int:
        """Rounds of corrections of samples; none of reference completions, nor by default of the
        samples of a loss that requires the student's own."""
        if self.loss == SFT:
            return 0
        if self.pair.corrections is not None:
            return self.pair.corrections
        default: int = RolloutConfig.model_fields["corrections"].default
        return 0 if self._is_policy_gradient else default

    @property
    def importance(self) -> ImportanceConfig:
        """Weights of samples; none if their gradient would be biased."""
        return ImportanceConfig(least=1) if self._is_policy_gradient else self.pair.importance

    @property
    def temperature(self) -> float:
        """Sampling temperature; 1 by default if the gradient is an estimate over samples."""
        if self.pair.temperature is not None:
            return self.pair.temperature
        default: float = RolloutConfig.model_fields["temperature"].default
        return 1.0 if self._is_policy_gradient else default

    @property
    def _is_policy_gradient(self) -> bool:
        return loss_settings(self.loss).type == "policy_gradient"

    @property
    def teachers(self) -> Mapping[str, Side]:
        """The run's teachers by name."""
        return self.pair.teachers_of(self.loss)

    @property
    def models(self) -> list[tuple[Side, Role, int]]:
        """The models of the run: side, role and seed."""
        sides = self.teachers.values()
        return [
            *((side, "teacher", 0) for side in sides),
            (self.pair.student, "student", self.seed),
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that determines the result, up to rounding, except the code."""
        pair = self.pair
        return {
            "models": [model_key(*model) for model in self.models],
            "loss": loss_settings(self.loss).model_dump(mode="json"),
            "steps": pair.steps,
            "learning_rate": pair.learning_rate,
            "top_k": pair.top_k,
            "max_new_tokens": pair.max_new_tokens,
            "prompts_per_step": PROMPTS_PER_STEP,
            "evaluations": self.evaluations,
            "importance": [self.importance.least_weight, self.importance.discount],
            "temperature": self.temperature,
            **(
                {}
                if pair.teacher_temperature is None
                else {"teacher_temperature": pair.teacher_temperature}
            ),
            **({"corrections": self.corrections} if self.corrections else {}),
        }


def distil(run: Run, models: Path, report: Report) -> dict[str, Any]:
    """Run the distillation in this process; return the curve and the processor seconds."""
    return asyncio.run(_distil(run, models, report))


async def _distil(run: Run, models: Path, report: Report) -> dict[str, Any]:
    pair, started = run.pair, time.process_time()
    config = student_config(run, models)
    student = Student.load(config)
    encoder = Encoder(pair.student.tokenizer())
    held_out = {name: task.held_out() for name, task in pair.tasks.items()}
    sampler, order = _sampling(run, student, encoder)
    cache = ProjectionCache()
    curve = [await _point(0, run, student, held_out, {})]
    seconds = {"collect": 0.0, "update": 0.0}
    since: list[Metrics] = []
    first_loss, stopped = math.nan, None
    async with connected_teachers(run, student, models, cache) as (pool, teachers):
        scorer = RolloutScorer(pool, teachers, student.table)
        corrector = Corrector(
            sampler,
            scorer,
            student.identity,
            rollout_config(run),
            seed=run.seed,
        )
        learner = Learner(
            student,
            config,
            losses={name: loss_of(run, student, each, cache) for name, each in teachers.items()},
            teacher_weights=dict.fromkeys(teachers, 1.0),
            max_steps=pair.steps,
            seed=run.seed,
        )
        tables = {name: teacher.tokenizer.table for name, teacher in teachers.items()}
        importance = ImportanceWeights(run.importance, run.temperature, tables)
        monitor, findings = DegradationMonitor(DegradationConfig()), list[dict[str, Any]]()
        for step in range(pair.steps):
            begun = time.process_time()
            examples, dropped = await collect(
                order.batch(step), sampler, scorer, step, corrector=corrector
            )
            collected = time.process_time()
            tokens = sum(len(example.rollout.completion) for example in examples)
            batches = pack(
                examples,
                tokens_per_micro_batch=config.tokens_per_micro_batch,
                importance=importance,
            )
            try:
                updated, measured = learner.update(batches, tokens=tokens, step=step)
            except TrainingError as error:  # a result, too: no sample could be compared any more
                stopped = str(error)
                curve.append(await _point(step, run, student, held_out, _means(since)))
                break
            seconds["collect"] += collected - begun
            seconds["update"] += time.process_time() - collected
            first_loss = updated["loss"] if step == 0 else first_loss
            metrics = updated | sample_metrics(
                examples,
                updated | dropped,
                measured,
                {name: scorer.counters(name) for name in teachers},
                {name: table.size for name, table in tables.items()},
                step=step,
                temperature=run.temperature,
            )
            since.append(
                {name: metrics[key] for name, key in _MEASURED.items()}
                | {f"{name}/reverse_kl": metrics[_reverse_kl(name)] for name in teachers}
            )
            findings += [
                {"step": step + 1, "metric": each.metric, "is_grave": each.is_grave}
                for each in monitor.observe(step + 1, metrics)
            ]
            if _is_due(step + 1, run):
                curve.append(await _point(step + 1, run, student, held_out, _means(since)))
                since = []
            report(step + 1, updated["loss"], curve[-1]["accuracy"])
    with replacing_folder(student_folder(run, models)) as unfinished:
        student.model.save_pretrained(unfinished)
        student.tokenizer.save_pretrained(unfinished)
    return {
        "pair": pair.name,
        "loss": run.loss,
        "seed": run.seed,
        "settings": run.settings,
        "accuracy": curve[-1]["accuracy"],
        "before": curve[0]["accuracy"],
        "first_loss": first_loss,
        "stopped": stopped,
        "findings": findings,
        "curve": curve,
        "processor_seconds": {**seconds, "total": time.process_time() - started},
    }


def student_folder(run: Run, models: Path) -> Path:
    """Return the folder of the distilled student."""
    return models / f"distilled-{run.name}"


def student_config(run: Run, models: Path) -> StudentConfig:
    """Return the settings of the student and its optimizer, the same for every loss."""
    return StudentConfig(
        model=str(model_folder(run.pair.student, "student", run.seed, models)),
        device="cpu",
        learning_rate=run.pair.learning_rate,
        warmup_steps=min(_WARM_UP_STEPS, run.pair.steps),
        min_learning_rate_ratio=0.05,
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )


def _sampling(run: Run, student: Student, encoder: Encoder) -> tuple[Sampler, PromptOrder]:
    sources = [
        (exercise, name)
        for name, task in run.pair.tasks.items()
        for exercise in task.training(run.seed)
    ]
    prompts = [
        Prompt(index=index, messages=exercise.messages, teachers={name: 1.0})
        for index, (exercise, name) in enumerate(sources)
    ]
    order = PromptOrder(prompts, prompts_per_step=PROMPTS_PER_STEP, seed=run.seed, shuffle=True)
    config = rollout_config(run)
    if run.loss == SFT:
        exercises = [exercise for exercise, _ in sources]
        return ReferenceSampler(student, config, encoder, exercises), order
    sampler = Sampler(student, config, seed=run.seed, keep_topk=config.correction_candidates)
    return sampler, order


def rollout_config(run: Run) -> RolloutConfig:
    """Return the settings of the student's samples."""
    pair = run.pair
    return RolloutConfig(
        prompts_per_step=PROMPTS_PER_STEP,
        generation_batch_size=PROMPTS_PER_STEP,
        max_new_tokens=pair.max_new_tokens,
        temperature=run.temperature,
        corrections=run.corrections,
    )


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
        exercises = [self._exercises[prompt.index] for prompt in prompts]
        return reference_rollouts(self._own, self._reference_encoder, exercises, prompts, step)


@asynccontextmanager
async def connected_teachers(
    run: Run, student: Student, models: Path, cache: ProjectionCache
) -> AsyncGenerator[tuple[TeacherPool, Mapping[str, Teacher]]]:
    """Start the teachers of a run and connect to them."""
    clients: dict[str, TeacherClient] = {}
    configs: dict[str, TeacherConfig] = {}
    for name, side in run.teachers.items():
        folder = model_folder(side, "teacher", 0, models)
        service = TeacherService.load(TeacherSettings(model=str(folder), name=name, device="cpu"))
        await asyncio.to_thread(service.warm_up)  # it runs an event loop
        url = (f"http://{name}",)
        configs[name] = TeacherConfig(
            url=url,
            top_k=run.pair.top_k,
            loss=loss_settings(run.loss),
            teacher_temperature=run.pair.teacher_temperature,
        )
        transport = httpx.ASGITransport(create_app(service))
        clients[name] = TeacherClient(name, url, transport=transport)
    async with TeacherPool(clients) as pool:
        yield (
            pool,
            await connect_teachers(pool, configs, student.identity, cache, {}, wait_seconds=60.0),
        )


def loss_of(run: Run, student: Student, teacher: Teacher, cache: ProjectionCache) -> Loss:
    """Build the loss between the student and one teacher."""
    if run.loss == SFT:
        return SftLoss()
    sides = student.identity, teacher.tokenizer
    if run.loss == PKL_PARITY:
        projection = cache.on(student.device, teacher.projection)
        return PklParityLoss(projection, temperature=run.pair.teacher_temperature or 1.0)
    return build_loss(teacher.config.loss, *sides, student.device, cache=cache)


def _reverse_kl(teacher: str) -> str:
    return f"teacher/{teacher}/reverse_kl_estimate"


def _is_due(steps_done: int, run: Run) -> bool:
    """Return whether to evaluate: evenly over the run and always at the end."""
    steps = run.pair.steps
    return steps_done * run.evaluations // steps > (steps_done - 1) * run.evaluations // steps


async def _point(
    step: int,
    run: Run,
    student: Student,
    held_out: Mapping[str, Sequence[Exercise]],
    metrics: Metrics,
) -> dict[str, Any]:
    """Return one point of the curve; ``accuracy`` is the mean over the tasks."""
    longest = run.pair.student.max_new_tokens
    shares = {name: await accuracy(student, each, longest) for name, each in held_out.items()}
    mean = math.fsum(shares.values()) / len(shares)
    return {"step": step, "accuracy": mean, "accuracies": shares, **metrics}


def _means(metrics: Sequence[Metrics]) -> Metrics:
    names = metrics[0] if metrics else {}
    means = {name: math.fsum(m[name] for m in metrics) / len(metrics) for name in names}
    return {name: value for name, value in means.items() if math.isfinite(value)}
