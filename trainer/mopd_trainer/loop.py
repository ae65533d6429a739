"""The loop: prompts -> complete -> score -> align -> pack -> loss -> step -> push -> journal."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mopd_client.pool import TeacherPool
from mopd_client.transport.counters import Counters
from mopd_losses.build import build_loss
from mopd_losses.config import TopKKlConfig
from mopd_losses.core.loss import Loss
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.topk.full_vocabulary import FullVocabularyLoss
from mopd_protocol.samples import Prompt
from mopd_trainer.collection import collect
from mopd_trainer.config.extras import require_packages
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.loading import write_resolved
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.packing import pack
from mopd_trainer.data.prompts import PromptOrder, read_prompts
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.interruption import Interruption, Stopped
from mopd_trainer.metrics.step_metrics import (
    answer_metrics,
    rollout_metrics,
    teacher_metrics,
)
from mopd_trainer.metrics.timers import StepTimer
from mopd_trainer.pipeline import Collected, Pipeline, pipeline
from mopd_trainer.reporting.plan import describe_plan
from mopd_trainer.reporting.progress import RunProgress
from mopd_trainer.reporting.report import write_report
from mopd_trainer.rollouts.factory import chosen_source
from mopd_trainer.rollouts.remote_sampler import RolloutWorkers
from mopd_trainer.run_folder.checkpoint import FINAL, save_student
from mopd_trainer.run_folder.journal import Journal
from mopd_trainer.run_folder.lock import run_lock
from mopd_trainer.run_folder.recording import recorder_of
from mopd_trainer.run_folder.replay import Replay
from mopd_trainer.run_folder.retention import CheckpointManager, starting_checkpoint
from mopd_trainer.run_folder.shown_examples import shown_examples
from mopd_trainer.run_folder.trackers import trackers_of
from mopd_trainer.student.prompt_checks import require_answerable
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.connect import Teacher, connect_teachers, teacher_pool
from mopd_trainer.teachers.local.client import TeacherLock
from mopd_trainer.teachers.local.residency import LocalTeachers
from mopd_trainer.teachers.scoring import RolloutScorer
from mopd_trainer.training.learner import Learner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that a run's steps are made with."""

    config: RunConfig
    prompts: Sequence[Prompt]
    student: Student
    teachers: dict[str, Teacher]
    pool: TeacherPool  # asks nobody in a replay
    replay: Replay | None
    learner: Learner
    checkpoints: CheckpointManager
    workers: RolloutWorkers | None
    """Who writes for the student, where it does not itself."""
    done: int
    """Steps that an earlier part of the run has made."""


async def train(
    config: RunConfig,
    console: Console,
    *,
    prompts: Sequence[Prompt] | None = None,
    ranks: Ranks | None = None,
    workers: RolloutWorkers | None = None,
) -> Path:
    """Runs a distillation to its end; the folder of the finished student.

    Args:
        prompts: those of ``config.data``, where they have been read already.
        ranks: those that train the student together, of which this is the first.
        workers: who writes for the student, where it does not itself.

    Raises:
        MopdError: when something that was given cannot work, alone or in an exception group;
            nothing is left half-written.
        Interrupted: after SIGINT, SIGTERM or SIGHUP; the step that it came in is finished, or given
            up where it had not changed anything, and its checkpoint is there.
    """
    prompts = read_prompts(config.data, config.scoring_teachers) if prompts is None else prompts
    require_packages(config)
    identity = RunIdentity.of(config, prompts)
    with run_lock(config.output_dir):
        return await _train(config, console, prompts, identity, ranks, workers)


async def _train(
    config: RunConfig,
    console: Console,
    prompts: Sequence[Prompt],
    identity: RunIdentity,
    ranks: Ranks | None,
    workers: RolloutWorkers | None,
) -> Path:
    checkpoint = starting_checkpoint(config, identity)
    turn = TeacherLock()
    pool = teacher_pool(
        config.contacted_teachers, config.score_cache, turn=turn, device=config.student.device
    )
    async with pool:
        student = Student.load(config.student, ranks)
        require_answerable(config, prompts, student.identity)
        cache = ProjectionCache(config.projection_folder)
        expected = checkpoint.manifest_ids if checkpoint else {}
        with console.status(f"waiting for {len(config.contacted_teachers)} teachers"):
            teachers = await connect_teachers(
                pool,
                config.contacted_teachers,
                student.identity,
                cache,
                {} if config.accept_changed_teachers else expected,
                wait_seconds=config.teacher_wait_seconds,
            )
        replay = Replay.of(config, identity, prompts, student.identity, cache)
        teachers = teachers if replay is None else replay.teachers
        console.print(describe_plan(config, prompts, student.identity, teachers))
        turn.models = _local_teachers(config, student, teachers)
        learner = _learner(config, student, teachers, cache, turn.models)
        done = checkpoint.step if checkpoint else 0
        if checkpoint:
            checkpoint.restore(student, learner.optimizer)
            console.print(f"resumed after step {done} from {checkpoint.folder}", markup=False)
        manifests = {name: teacher.manifest for name, teacher in teachers.items()}
        run = Run(
            config=config,
            prompts=prompts,
            student=student,
            teachers=teachers,
            pool=pool,
            replay=replay,
            learner=learner,
            checkpoints=CheckpointManager(config, identity, manifests, done=done),
            workers=workers,
            done=done,
        )
        with Interruption() as interruption:
            await _steps(run, interruption, console)
    finished = save_student(student, config.output_dir / FINAL)
    write_report(config.output_dir)
    return finished


async def _steps(run: Run, interruption: Interruption, console: Console) -> None:
    config, student, learner, replay = run.config, run.student, run.learner, run.replay
    checkpoints, done = run.checkpoints, run.done
    clock = StepTimer()
    recorder = recorder_of(config, run.teachers, student.table, checkpoints.identity, done=done)
    write_resolved(config, config.output_dir / "config.yaml")
    async with _ahead(run, clock) as ahead:
        clock.take()  # an engine's start belongs to no step
        with (
            Journal(
                config.output_dir,
                from_step=done,
                tensorboard=config.logging.tensorboard,
                trackers=trackers_of(config),
            ) as journal,
            RunProgress(
                console, name=config.exp_name, done=done, total=config.max_steps
            ) as progress,
        ):
            for step in range(done, config.max_steps):
                try:
                    examples, metrics = await interruption.unless_asked(
                        ahead.examples(step) if replay is None else replay.collect(step, clock)
                    )
                except Stopped:
                    journal.settle()
                    saved = checkpoints.ensure(step, student, learner.optimizer)
                    raise interruption.told(step=step, checkpoint=saved) from None
                if recorder is not None:
                    recorder.write(step + 1, examples)
                is_logged = (step + 1) % config.logging_steps == 0 or step + 1 == config.max_steps
                # The first step's too, to see what became of them.
                is_shown = is_logged or step == 0
                shown = shown_examples(examples, config.logging.completions) if is_shown else []
                tokens = sum(len(example.rollout.completion) for example in examples)
                batches = pack(
                    examples,
                    tokens_per_micro_batch=config.student.tokens_per_micro_batch,
                    ranks=student.ranks.size,
                    shown=shown,
                )
                with clock.phase("train"):
                    updated, losses = await asyncio.to_thread(
                        learner.update, batches, tokens=tokens, step=step, dropped=metrics
                    )
                metrics |= updated | rollout_metrics(examples, step=step)
                if config.data.uses_reference_answers:
                    metrics |= answer_metrics(examples)
                metrics |= teacher_metrics(examples, losses, _counters(run))
                metrics["tokens/trained"] = float(tokens)
                if run.workers is not None:
                    metrics["rollout/worker_restarts"] = float(run.workers.take_restarts())
                metrics |= clock.take()
                journal.write(step + 1, metrics)
                for number, example in enumerate(shown):
                    told = {name: loss.shown.get(number) for name, loss in losses.items()}
                    journal.write_completion(step + 1, example, told)
                progress.advance(step + 1, metrics, show=is_logged)
                checkpoints.observe(metrics)
                if checkpoints.is_due(step + 1):
                    journal.settle()  # what a checkpoint is after is on the disk before it is
                    checkpoints.save(step + 1, student, learner.optimizer)


@asynccontextmanager
async def _ahead(run: Run, clock: StepTimer) -> AsyncGenerator[Pipeline]:
    """The steps' examples, collected ahead of training where that is asked for; in a replay, which
    has them, none."""
    config = run.config
    order = PromptOrder(
        run.prompts,
        prompts_per_step=config.rollout.prompts_per_step,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    scorer = RolloutScorer(run.pool, run.teachers, run.student.table)
    steps = range(run.done, config.max_steps if run.replay is None else run.done)
    chosen = chosen_source(config, run.student, version=run.done, workers=run.workers)
    async with chosen as source:

        async def collect_step(step: int, written: asyncio.Event) -> Collected:
            when = config.rollout.scoring
            return await collect(
                order.batch(step), source, scorer, step, scoring=when, clock=clock, written=written
            )

        async def push(version: int) -> None:
            with clock.phase("push"):
                await source.push(version)

        async with pipeline(collect_step, push, config.rollout, steps) as ahead:
            yield ahead


def _counters(run: Run) -> dict[str, Counters]:
    """What asking each teacher cost since this was last asked."""
    if run.replay is not None:
        return {name: Counters() for name in run.teachers}
    return {name: run.pool.client(name).counters.pop() for name in run.config.contacted_teachers}


def _local_teachers(
    config: RunConfig, student: Student, teachers: dict[str, Teacher]
) -> LocalTeachers:
    local = {
        name: settings for name, settings in config.contacted_teachers.items() if settings.local
    }
    return LocalTeachers(
        local,
        {name: teachers[name].tokenizer.table for name in local},
        device=student.device,
        tokens_per_batch=config.student.tokens_per_micro_batch,
        ranks=student.ranks,
    )


def _learner(
    config: RunConfig,
    student: Student,
    teachers: dict[str, Teacher],
    cache: ProjectionCache,
    local: LocalTeachers,
) -> Learner:
    def loss_of(name: str, teacher: Teacher) -> Loss:
        settings = teacher.config
        if settings.support == "full":
            assert isinstance(settings.loss, TopKKlConfig)  # its settings have been checked
            head = local.head(name, student.device)
            return FullVocabularyLoss(head, settings.loss, settings.temperature)
        return build_loss(
            settings.loss,
            student.identity,
            teacher.tokenizer,
            student.device,
            cache=cache,
            temperature=settings.temperature,
        )

    return Learner(
        student,
        config.student,
        losses={name: loss_of(name, teacher) for name, teacher in teachers.items()},
        teacher_weights={name: teacher.config.weight for name, teacher in teachers.items()},
        max_steps=config.max_steps,
        seed=config.seed,
    )
