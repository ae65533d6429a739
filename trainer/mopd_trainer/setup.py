"""Build the components of a run: teachers, student, learner, sampler, log, checkpoints."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from rich.console import Console

from mopd_client.pool import TeacherPool
from mopd_client.transport.counters import Counters
from mopd_losses.build import build_loss
from mopd_losses.config import PolicyGradientConfig, TopKKlConfig
from mopd_losses.core.loss import Loss
from mopd_losses.ends.end_event import EndEvent
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.sampled.clipped_ratio import ClippedRatioLoss
from mopd_losses.topk.full_vocabulary import FullVocabularyLoss
from mopd_protocol.samples import Prompt
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.collection import collect
from mopd_trainer.config.extras import require_packages
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.loading import write_resolved
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import student_topk
from mopd_trainer.corrections import Corrector
from mopd_trainer.data.importance import ImportanceWeights
from mopd_trainer.data.prompts import PromptOrder, training_prompts
from mopd_trainer.data.selection import TokenSelection
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.evaluation.models import StudentModel
from mopd_trainer.evaluation.rewards import RolloutGrader
from mopd_trainer.evaluation.schedule import RunEvaluation
from mopd_trainer.evaluation.sets import EvaluationSet, read_run_sets
from mopd_trainer.evaluation.teacher_model import TeacherModel
from mopd_trainer.interruption import Interruption
from mopd_trainer.metrics.timers import StepTimer
from mopd_trainer.phases import Coordinator, Run
from mopd_trainer.pipeline import Collected, Pipeline, run_pipeline
from mopd_trainer.reporting.plan import describe_plan, selected_losses
from mopd_trainer.rollouts.factory import open_source
from mopd_trainer.rollouts.remote_sampler import RolloutWorkers
from mopd_trainer.rollouts.source import CompletionGenerator
from mopd_trainer.run_folder.checkpoint import Checkpoint
from mopd_trainer.run_folder.disk_space import require_space
from mopd_trainer.run_folder.hub import require_hub
from mopd_trainer.run_folder.journal import past_metrics
from mopd_trainer.run_folder.lock import run_lock
from mopd_trainer.run_folder.recordings.recording import recorder_of
from mopd_trainer.run_folder.recordings.replay import Replay
from mopd_trainer.run_folder.retention import CheckpointManager, starting_checkpoint
from mopd_trainer.step_log import StepLog
from mopd_trainer.student.prompt_checks import check_prompts
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.connect import Teacher, connect_teachers, teacher_pool
from mopd_trainer.teachers.control import Controls
from mopd_trainer.teachers.local.client import TeacherLock
from mopd_trainer.teachers.local.residency import LocalTeachers
from mopd_trainer.teachers.scoring import RolloutScorer
from mopd_trainer.training.degradation import DegradationMonitor
from mopd_trainer.training.learner import Learner


@dataclass(eq=False)
class _Inputs:
    """Data, checkpoint and teachers of a run, on rank 0."""

    prompts: Sequence[Prompt]
    identity: RunIdentity
    checkpoint: Checkpoint | None
    pool: TeacherPool
    lock: TeacherLock
    projections: ProjectionCache
    replay: Replay | None
    teachers: dict[str, Teacher]
    sets: Sequence[EvaluationSet]
    grader: RolloutGrader


@asynccontextmanager
async def open_run(
    config: RunConfig,
    console: Console,
    *,
    prompts: Sequence[Prompt] | None = None,
    ranks: Ranks | None = None,
    workers: RolloutWorkers | None = None,
) -> AsyncGenerator[Run]:
    """Build a run on this rank, restored from its checkpoint; all ranks must call it.

    Raises:
        MopdError: as ``train``.
    """
    ranks = ranks or Ranks()
    timer = StepTimer()
    async with AsyncExitStack() as stack:
        interruption = Interruption(ignored=not ranks.is_rank_zero)
        inputs = None
        if ranks.is_rank_zero:
            inputs = await _open_inputs(config, prompts, stack)
        else:
            stack.enter_context(interruption)
        student = Student.load(config.student, ranks)
        if inputs is not None:
            await _connect(config, inputs, student, console)
        local_teachers = _local_teachers(config, student, inputs)
        learner = _learner(config, student, local_teachers, inputs)
        first_step = _restore(student, learner, local_teachers, inputs)
        coordinator = None
        if inputs is not None:
            if first_step and inputs.checkpoint is not None:
                folder = inputs.checkpoint.folder
                console.print(f"resumed after step {first_step} from {folder}", markup=False)
            stack.enter_context(interruption)
            coordinator = await _open_coordinator(
                config, console, inputs, student, workers, timer, first_step, stack
            )
        timer.pop()  # the start of a rollout engine is not part of a step
        yield Run(
            config=config,
            ranks=ranks,
            student=student,
            local_teachers=local_teachers,
            learner=learner,
            interruption=interruption,
            timer=timer,
            first_step=first_step,
            coordinator=coordinator,
        )


async def _open_inputs(
    config: RunConfig, prompts: Sequence[Prompt] | None, stack: AsyncExitStack
) -> _Inputs:
    prompts = training_prompts(config) if prompts is None else prompts
    require_packages(config)
    require_hub(config.student.push_to_hub)
    sets = read_run_sets(config)
    grader = RolloutGrader(config.rewards, config.reinforcement)
    identity = RunIdentity.of(config, prompts)
    stack.enter_context(run_lock(config.output_dir))
    checkpoint = starting_checkpoint(config, identity)
    lock = TeacherLock()
    device = config.student.device
    teachers = config.contacted_teachers
    pool = teacher_pool(teachers, config.score_cache, lock=lock, device=device, seed=config.seed)
    await stack.enter_async_context(pool)
    projections = ProjectionCache(config.projection_folder)
    return _Inputs(prompts, identity, checkpoint, pool, lock, projections, None, {}, sets, grader)


async def _connect(config: RunConfig, inputs: _Inputs, student: Student, console: Console) -> None:
    """Connect to the teachers, or load a replay, and print the plan."""
    check_prompts(config, inputs.prompts, student.identity)
    student.identity.tokenizer_files.require_reloadable()
    require_space(config, student.identity.trained)
    expected = inputs.checkpoint.manifest_ids if inputs.checkpoint else {}
    with console.status(f"waiting for {len(config.contacted_teachers)} teachers"):
        inputs.teachers = await connect_teachers(
            inputs.pool,
            config.contacted_teachers,
            student.identity,
            inputs.projections,
            {} if config.accept_changed_teachers else expected,
            wait_seconds=config.teacher_wait_seconds,
            losses=inputs.checkpoint.losses if inputs.checkpoint else {},
        )
    inputs.replay = Replay.of(
        config, inputs.identity, inputs.prompts, student.identity, inputs.projections
    )
    if inputs.replay is not None:
        inputs.teachers = inputs.replay.teachers
    console.print(describe_plan(config, inputs.prompts, student.identity, inputs.teachers))


def _local_teachers(config: RunConfig, student: Student, inputs: _Inputs | None) -> LocalTeachers:
    """Load the local teachers on this rank."""
    configs = {name: each for name, each in config.contacted_teachers.items() if each.local}
    tables = {}
    if inputs is not None:
        tables = {name: inputs.teachers[name].tokenizer.table for name in configs}
    local_teachers = LocalTeachers(
        configs,
        student.ranks.broadcast(tables) if configs else {},
        device=student.device,
        tokens_per_batch=config.student.tokens_per_micro_batch,
        ranks=student.ranks,
        student=student,
    )
    if inputs is not None:
        inputs.lock.models = local_teachers
    return local_teachers


def _learner(
    config: RunConfig, student: Student, local_teachers: LocalTeachers, inputs: _Inputs | None
) -> Learner:
    losses: dict[str, Loss] = {}
    weights: dict[str, float] = {}
    if inputs is not None:
        for name, teacher in inputs.teachers.items():
            losses[name] = teacher_loss(teacher, student, local_teachers, inputs.projections)
            weights[name] = teacher.config.weight
    losses, weights = student.ranks.broadcast((losses, weights))
    return Learner(
        student,
        config.student,
        losses=losses,
        teacher_weights=weights,
        max_steps=config.max_steps,
        seed=config.seed,
        reward_loss=ClippedRatioLoss(config.reinforcement.clip, config.rollout.temperature),
    )


def teacher_loss(
    teacher: Teacher, student: Student, local_teachers: LocalTeachers, cache: ProjectionCache
) -> Loss:
    """Build the loss of a teacher."""
    settings = teacher.config
    if settings.control == "constant_negative":
        sides = student.identity, student.identity
        return build_loss(PolicyGradientConfig(), *sides, student.device, cache=cache)
    if settings.support == "full":
        assert isinstance(settings.loss, TopKKlConfig)  # checked with the settings; auto selects it
        head = local_teachers.head(teacher.name, student.device)
        tables = student.table, teacher.tokenizer.table
        ends = EndEvent.between(*tables, one_vocabulary=True)
        return FullVocabularyLoss(head, settings.loss, settings.temperature, ends)
    return build_loss(
        settings.loss,
        student.identity,
        teacher.tokenizer,
        student.device,
        cache=cache,
        temperature=settings.temperature,
    )


def _restore(
    student: Student, learner: Learner, local_teachers: LocalTeachers, inputs: _Inputs | None
) -> int:
    """Load the checkpoint, if there is one, on all ranks; return its step."""
    checkpoint = inputs.checkpoint if inputs is not None else None
    step: int | None = student.ranks.broadcast(None if checkpoint is None else checkpoint.step)
    if step is None:
        return 0
    if checkpoint is not None:
        checkpoint.restore(student, learner.optimizer, local_teachers)
    else:
        student.load_weights(None)
        learner.optimizer.load_state_dict({})
    student.gather()  # the sampler starts with these weights
    return step


async def _open_coordinator(
    config: RunConfig,
    console: Console,
    inputs: _Inputs,
    student: Student,
    workers: RolloutWorkers | None,
    timer: StepTimer,
    first_step: int,
    stack: AsyncExitStack,
) -> Coordinator:
    manifests = {name: teacher.manifest for name, teacher in inputs.teachers.items()}
    losses = {name: teacher.config.loss.type for name, teacher in inputs.teachers.items()}
    checkpoints = CheckpointManager(config, inputs.identity, manifests, losses, done=first_step)
    recorder = recorder_of(config, inputs.teachers, student.table, inputs.identity, done=first_step)
    write_resolved(config, config.output_dir / "config.yaml", selected_losses(inputs.teachers))
    pipeline, generator = await stack.enter_async_context(
        _open_pipeline(config, inputs, student, workers, timer, first_step)
    )
    past = past_metrics(config.output_dir, first_step) if first_step else ()
    recommended = all(teacher.has_recommended_loss for teacher in inputs.teachers.values())
    monitor = DegradationMonitor(config.degradation, past, recommended=recommended)
    log = stack.enter_context(_step_log(config, console, inputs, student, workers, first_step))
    evaluation = RunEvaluation(
        config,
        inputs.sets,
        StudentModel(student, generator),
        _evaluated_teachers(config, inputs),
        log.evaluations(),
    )
    importance = ImportanceWeights(
        config.importance, config.rollout.temperature, _tables(inputs.teachers)
    )
    replay, grader = inputs.replay, inputs.grader
    return Coordinator(
        pipeline, replay, recorder, log, checkpoints, evaluation, monitor, importance, grader
    )


@asynccontextmanager
async def _open_pipeline(
    config: RunConfig,
    inputs: _Inputs,
    student: Student,
    workers: RolloutWorkers | None,
    timer: StepTimer,
    first_step: int,
) -> AsyncGenerator[tuple[Pipeline, CompletionGenerator]]:
    """Open sampling, scoring and corrections of all steps, and what completes evaluation sets."""
    order = PromptOrder(
        inputs.prompts,
        prompts_per_step=config.rollout.prompts_per_step,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    controls = Controls.of(config.contacted_teachers, inputs.prompts, config.seed)
    scorer = RolloutScorer(
        inputs.pool,
        inputs.teachers,
        student.table,
        controls=controls,
        selection=TokenSelection(student.table, config.tokens, config.rollout.temperature),
    )
    # A replay has the examples of every step.
    steps = range(first_step, config.max_steps if inputs.replay is None else first_step)
    async with open_source(config, student, version=first_step, workers=workers) as opened:
        source, generator = opened
        corrector = Corrector(
            generator,
            scorer,
            student.identity,
            config.rollout,
            seed=config.seed,
            kept_topk=student_topk(config.scoring_teachers),
            timer=timer,
        )

        async def collect_step(step: int, sampled: asyncio.Event) -> Collected:
            return await collect(
                order.batch(step),
                source,
                scorer,
                step,
                corrector=corrector,
                grader=inputs.grader,
                scoring=config.rollout.scoring,
                drop_truncated=config.rollout.truncated == "drop",
                timer=timer,
                sampled=sampled,
            )

        push = source.push_weights
        async with run_pipeline(collect_step, push, config.rollout, steps) as pipeline:
            yield pipeline, generator


def _step_log(
    config: RunConfig,
    console: Console,
    inputs: _Inputs,
    student: Student,
    workers: RolloutWorkers | None,
    first_step: int,
) -> StepLog:
    def counters() -> Mapping[str, Counters]:
        if inputs.replay is not None:
            return {name: Counters() for name in inputs.teachers}
        pool = inputs.pool
        return {name: pool.client(name).counters.pop() for name in config.contacted_teachers}

    return StepLog(
        config,
        console,
        first_step=first_step,
        counters=counters,
        workers=workers,
        vocabularies={name: each.manifest.tokenizer_size for name, each in inputs.teachers.items()},
        student=student.table,
        teachers=_tables(inputs.teachers),
    )


def _tables(teachers: Mapping[str, Teacher]) -> dict[str, TokenTable]:
    return {name: teacher.tokenizer.table for name, teacher in teachers.items()}


def _evaluated_teachers(config: RunConfig, inputs: _Inputs) -> dict[str, TeacherModel]:
    names = {name for each in inputs.sets for name in config.evaluated_teachers(each.name)}
    return {
        name: TeacherModel(
            inputs.pool.client(name),
            inputs.teachers[name].tokenizer.table,
            max_top_k=inputs.teachers[name].manifest.max_top_k,
            chat_template_kwargs=inputs.teachers[name].config.chat_template_kwargs,
            name=name,
        )
        for name in sorted(names)
    }
