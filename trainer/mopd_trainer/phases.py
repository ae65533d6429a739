"""``Run``: the components of a run, and the phases of a step as the loop calls them.

Every rank has a ``Run`` and calls the same phases. ``Coordinator`` contains the components
of rank 0; on non-zero ranks a phase only takes part in rank 0's collective calls.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mopd_protocol.errors import DegradationError, DiskError, MopdError, RankError
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.importance import ImportanceWeights
from mopd_trainer.data.packing import MicroBatch, pack, split
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.evaluation.rewards import RolloutGrader
from mopd_trainer.evaluation.schedule import RunEvaluation
from mopd_trainer.interruption import Interruption, Stopped
from mopd_trainer.metrics.step_metrics import LossMeasurements, Metrics
from mopd_trainer.metrics.timers import StepTimer
from mopd_trainer.pages.report import write_report
from mopd_trainer.pipeline import Collected, Pipeline
from mopd_trainer.run_folder.checkpoint import FINAL, checkpoint_folder, save_student
from mopd_trainer.run_folder.hub import push_to_hub
from mopd_trainer.run_folder.recordings.recording import Recorder
from mopd_trainer.run_folder.recordings.replay import Replay
from mopd_trainer.run_folder.retention import CheckpointManager
from mopd_trainer.step_log import StepLog
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.local.residency import LocalTeachers
from mopd_trainer.training.degradation import DegradationMonitor, Finding
from mopd_trainer.training.learner import Learner

Update = tuple[Metrics, dict[str, LossMeasurements]]


@dataclass(frozen=True, eq=False)
class Coordinator:
    """The components of rank 0."""

    pipeline: Pipeline
    replay: Replay | None
    recorder: Recorder | None
    log: StepLog
    checkpoints: CheckpointManager
    evaluation: RunEvaluation
    monitor: DegradationMonitor
    importance: ImportanceWeights
    grader: RolloutGrader


@dataclass(frozen=True, eq=False)
class Run:
    """The components of a run on this rank."""

    config: RunConfig
    ranks: Ranks
    student: Student
    local_teachers: LocalTeachers
    learner: Learner
    interruption: Interruption
    timer: StepTimer
    first_step: int
    """Steps completed by an earlier part of the run."""
    coordinator: Coordinator | None
    """None on non-zero ranks."""

    async def collect(self, step: int) -> Collected:
        """Return the examples of a step and the dropped samples; nothing on non-zero ranks.

        Raises:
            MopdError: when sampling or scoring fails, possibly in an exception group, with a
                checkpoint of the completed steps, which a note of the error names.
            Interrupted: after a signal, with a checkpoint of the completed steps.
        """
        collected: Collected = ([], {})
        failure: Exception | None = None
        outcome: Literal["collected", "stopped", "failed"] = "collected"
        if self.coordinator is not None:
            replay, pipeline = self.coordinator.replay, self.coordinator.pipeline
            try:
                collected = await self.interruption.cancel_on_signal(
                    pipeline.collect(step) if replay is None else replay.collect(step, self.timer)
                )
                collected = await _with_advantages(collected, self.coordinator.grader)
            except Stopped:
                outcome = "stopped"
            except (MopdError, ExceptionGroup) as error:
                if _lost_rank(error):
                    raise
                failure, outcome = error, "failed"
            await asyncio.to_thread(self.local_teachers.release)
        else:
            await asyncio.to_thread(self.local_teachers.serve)
        outcome = await asyncio.to_thread(self.ranks.broadcast, outcome)
        if outcome == "failed":
            await self._fail(step, failure)
        if outcome == "stopped":
            await self._stop(step)
        return collected

    def record(self, step: int, examples: Sequence[TrainingExample]) -> None:
        """Write the examples to the recording, if the run has one."""
        if self.coordinator is not None and self.coordinator.recorder is not None:
            self.coordinator.recorder.write(step + 1, examples)

    async def inspect(self, step: int, examples: Sequence[TrainingExample]) -> None:
        """Compute the student's most likely tokens for completions that the step will log."""
        config = self.config
        if not config.logs_completions(step + 1) or not config.logging.top_k:
            return
        await asyncio.to_thread(self.student.gather)
        if self.coordinator is not None:
            await asyncio.to_thread(self.coordinator.log.inspect, examples, self.student)

    async def pack(self, examples: Sequence[TrainingExample]) -> tuple[Iterable[MicroBatch], int]:
        """Return this rank's micro-batches, and the completion tokens of all ranks."""
        size = self.ranks.size
        tokens = sum(len(example.rollout.completion) for example in examples)
        budget = self.config.student.tokens_per_micro_batch
        batches = pack(
            examples,
            tokens_per_micro_batch=budget,
            ranks=size,
            average=self.config.loss_average,
            importance=None if self.coordinator is None else self.coordinator.importance,
            packed=self.student.packs,
        )
        if size == 1:
            return batches, tokens
        parts = [(part, tokens) for part in split(list(batches), size)]
        return await asyncio.to_thread(self.ranks.scatter, parts)

    async def update(
        self, micro_batches: Iterable[MicroBatch], *, step: int, tokens: int, dropped: Metrics
    ) -> Update:
        """Make one optimizer step on all ranks, as ``Learner.update``, and update self-teachers."""
        with self.timer.phase("train"):
            update = await asyncio.to_thread(
                self.learner.update, micro_batches, tokens=tokens, step=step, dropped=dropped
            )
            await asyncio.to_thread(self.local_teachers.update, step + 1)
        return update

    async def evaluate(self, steps: int) -> None:
        """Evaluate the weights after ``steps`` steps, if due.

        A signal cancels the evaluation; the resumed run repeats it.

        Raises:
            MopdError: when sampling or a teacher fails.
        """
        if self.config.evaluation is None:
            return
        coordinator = self.coordinator
        due = coordinator is not None and coordinator.evaluation.is_due(steps)
        if not await asyncio.to_thread(self.ranks.broadcast, due):
            return
        await asyncio.to_thread(self.student.gather)
        if coordinator is None:
            return
        with suppress(Stopped):
            with self.timer.phase("evaluate"):
                evaluating = coordinator.evaluation.evaluate(steps)
                metrics = await self.interruption.cancel_on_signal(evaluating)
            if steps == self.first_step:
                self.timer.pop()  # not part of a step
            coordinator.log.add_evaluation(steps, metrics)

    def log(
        self,
        step: int,
        examples: Sequence[TrainingExample],
        update: Update,
        *,
        tokens: int,
        dropped: Metrics,
    ) -> Metrics:
        """Write the metrics of a step and its selected completions; return them on rank 0."""
        if self.coordinator is None:
            return {}
        metrics, losses = update
        metrics = {**dropped, **metrics, "tokens/trained": float(tokens)}
        metrics = self.coordinator.log.write(step, examples, metrics, losses, self.timer)
        self.coordinator.checkpoints.observe(metrics)
        return metrics

    async def check_degradation(self, steps: int, metrics: Metrics) -> None:
        """Warn if the student has degraded; end the run if it has gravely.

        Raises:
            DegradationError: on rank 0, with a checkpoint after ``steps`` steps.
            SystemExit: on non-zero ranks.
        """
        error = None
        if self.coordinator is not None:
            for finding in self.coordinator.monitor.observe(steps, metrics):
                sound = self.coordinator.checkpoints.protect(finding.sound_steps)
                error = self._degradation_error(steps, finding, sound) or error
        if not self.config.stop_on_degradation or steps == self.config.max_steps:
            return
        if await asyncio.to_thread(self.ranks.broadcast, error is not None):
            await self._save_last(steps)
            raise error or SystemExit(1)

    def _degradation_error(
        self, steps: int, finding: Finding, sound: Path | None
    ) -> DegradationError | None:
        if not finding.is_grave:
            return None
        resume = f"resume from {sound}, saved before"
        if sound is None:
            resume = "start again with save_steps, as there is no checkpoint from before"
        return DegradationError(
            f"{finding.message}; stopped with checkpoint {checkpoint_folder(self.config, steps)}. "
            f"{finding.advice}, and {resume}; or set stop_on_degradation=false.",
            key=finding.metric,
        )

    def is_checkpoint_due(self, steps: int) -> bool:
        """Return True if a checkpoint is due after ``steps`` steps."""
        every = self.config.save_steps
        return steps == self.config.max_steps or bool(every and steps % every == 0)

    async def save_checkpoint(self, steps: int) -> None:
        """Save the complete training state after ``steps`` steps.

        Raises:
            DiskError: when the disk is full; older checkpoints remain.
        """
        await asyncio.to_thread(self.student.gather)
        if self.coordinator is None:  # takes part in gathering the optimizer state
            await asyncio.to_thread(self.learner.optimizer.state_dict)
            return
        self.coordinator.log.flush()  # the journal on disk is never behind a checkpoint
        await asyncio.to_thread(
            self.coordinator.checkpoints.save,
            steps,
            self.student,
            self.learner.optimizer,
            self.local_teachers,
        )

    async def push_weights(self, *, version: int) -> None:
        """Push the weights after ``version`` steps to the sampler.

        A signal cancels the push, and ``collect`` of the next step ends the run.

        Raises:
            MopdError: when the sampler does not load the weights.
        """
        if self.config.samples_rollouts:
            await asyncio.to_thread(self.student.gather)
        if self.coordinator is not None:
            with self.timer.phase("push"), suppress(Stopped):
                pushing = self.coordinator.pipeline.push_weights(version)
                await self.interruption.cancel_on_signal(pushing)

    async def save_student(self) -> Path:
        """Save and upload the trained student and save the report; return the student's folder.

        Raises:
            MopdError: when the upload fails.
        """
        folder = self.config.output_dir / FINAL
        await asyncio.to_thread(self.student.gather)
        if self.coordinator is not None:
            save_student(self.student, folder, self.student.final_dtype)
            write_report(self.config.output_dir)
            await asyncio.to_thread(push_to_hub, folder, self.config.student.push_to_hub)
        return folder

    async def _fail(self, steps: int, failure: Exception | None) -> None:
        """Save a checkpoint unless there is one, and end the run after ``steps`` steps.

        Raises:
            Exception: ``failure``, on rank 0.
            SystemExit: on non-zero ranks.
        """
        try:
            await self._save_last(steps)
        except DiskError as error:
            if failure is not None:
                failure.add_note(f"The checkpoint of step {steps} was not saved: {error}")
        else:
            if failure is not None and steps:
                failure.add_note(
                    f"Step {steps} is complete, with checkpoint "
                    f"{checkpoint_folder(self.config, steps)}. Resume with "
                    "resume_from_checkpoint=true."
                )
        raise failure or SystemExit(1)

    async def _stop(self, steps: int) -> None:
        """Save a checkpoint unless there is one, and end the run after ``steps`` steps.

        Raises:
            Interrupted: on rank 0.
            SystemExit: on non-zero ranks.
        """
        await self._save_last(steps)
        if self.coordinator is None:
            raise SystemExit(1)
        folder = checkpoint_folder(self.config, steps)
        saved = f"the checkpoint is {folder}" if steps else "no step was completed"
        raise self.interruption.error(step=steps, checkpoint=saved)

    async def _save_last(self, steps: int) -> None:
        """Save a checkpoint after ``steps`` steps unless there is one, and write the log."""
        missing = steps > 0 and not checkpoint_folder(self.config, steps).is_dir()
        if await asyncio.to_thread(self.ranks.broadcast, missing):
            await self.save_checkpoint(steps)
        if self.coordinator is not None:
            self.coordinator.log.flush()


async def _with_advantages(collected: Collected, grader: RolloutGrader) -> Collected:
    """Add the advantages of the step's rewards, and their metrics."""
    examples, metrics = collected
    examples, changes = await asyncio.to_thread(grader.with_advantages, examples)
    total = metrics.get("dropped/total", 0.0) + changes.get("dropped/total", 0.0)
    return examples, {**metrics, **changes, **({"dropped/total": total} if total else {})}


def _lost_rank(error: Exception) -> bool:
    """Return True if no collective call is possible any more."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(RankError) is not None
    return isinstance(error, RankError)
