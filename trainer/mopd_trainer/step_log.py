"""``StepLog``: write a step's metrics and completions to the journal, trackers and console."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from mopd_client.transport.counters import Counters
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.resources import memory_metrics, throughput_metrics
from mopd_trainer.metrics.samples import sample_metrics
from mopd_trainer.metrics.step_metrics import LossMeasurements, Metrics, reference_answer_metrics
from mopd_trainer.metrics.table import without_zero_events
from mopd_trainer.metrics.timers import StepTimer
from mopd_trainer.reporting.evaluation_text import evaluation_lines
from mopd_trainer.reporting.progress import RunProgress
from mopd_trainer.rollouts.remote_sampler import RolloutWorkers
from mopd_trainer.run_folder.journal import Journal
from mopd_trainer.run_folder.logged_completion import DETAILED_TOKENS, logged_completion
from mopd_trainer.run_folder.shown_examples import shown_examples
from mopd_trainer.run_folder.trackers import trackers_of
from mopd_trainer.student.likely_tokens import likely_tokens
from mopd_trainer.student.student import Student


class StepLog:
    """Journal and progress bar of a run.

    Args:
        first_step: steps completed by an earlier part of the run.
        counters: returns and resets the counters of every teacher.
        workers: rollout workers whose restarts are counted.
        vocabularies: number of ids of each teacher.
        student: token table of the student.
        teachers: token tables of the teachers.
    """

    def __init__(
        self,
        config: RunConfig,
        console: Console,
        *,
        first_step: int,
        counters: Callable[[], Mapping[str, Counters]],
        workers: RolloutWorkers | None,
        vocabularies: Mapping[str, int],
        student: TokenTable,
        teachers: Mapping[str, TokenTable],
    ) -> None:
        self._config = config
        self._console = console
        self._counters = counters
        self._first_step = first_step
        self._evaluation: Metrics = {}  # of the step that is written next
        self._workers = workers
        self._vocabularies = vocabularies
        self._student_table = student
        self._teacher_tables = teachers
        self._likely: dict[int, TopKLogprobs] = {}  # by example, of the step that is written next
        self._seconds = 0.0  # of the steps of this part
        self._journal = Journal(
            config.output_dir,
            from_step=first_step,
            tensorboard=config.logging.tensorboard,
            trackers=trackers_of(config),
        )
        self._progress = RunProgress(
            console, name=config.exp_name, done=first_step, total=config.max_steps
        )

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations of earlier parts of the run, as lines of the journal."""
        return self._journal.evaluations()

    def add_evaluation(self, steps: int, metrics: Metrics) -> None:
        """Write the evaluation after ``steps`` steps with the metrics of its step; before the first
        step of this part of the run, in a separate line."""
        if steps > self._first_step:
            self._evaluation = metrics
            return
        self._counters()  # requests to evaluate teachers are not part of a step
        self._journal.write(steps, metrics)
        self._print_evaluation(steps, metrics)

    def _print_evaluation(self, steps: int, metrics: Metrics) -> None:
        for line in evaluation_lines(metrics):
            text = f"evaluation after step {steps}  {line}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def write(
        self,
        step: int,
        examples: Sequence[TrainingExample],
        metrics: Metrics,
        losses: Mapping[str, LossMeasurements],
        timer: StepTimer,
    ) -> Metrics:
        """Write the step (counted from 0); return all its metrics.

        Args:
            metrics: of the update and the dropped samples.
        """
        config = self._config
        metrics = metrics | sample_metrics(
            examples,
            metrics,
            losses,
            self._counters(),
            self._vocabularies,
            step=step,
            temperature=config.rollout.temperature,
        )
        if config.data.uses_reference_answers:
            metrics |= reference_answer_metrics(examples)
        metrics |= {
            f"teacher/{name}/control": 1.0
            for name, teacher in config.scoring_teachers.items()
            if teacher.control is not None
        }
        if self._workers is not None:
            metrics["rollout/worker_restarts"] = float(self._workers.take_restarts())
        metrics |= timer.pop() | self._evaluation
        metrics |= throughput_metrics(metrics) | memory_metrics() | self._remaining(step, metrics)
        metrics = without_zero_events(metrics)
        self._journal.write(step + 1, metrics)
        if config.logs_completions(step + 1):
            self._write_completions(step + 1, examples, losses)
        self._progress.advance(step + 1, metrics, show=config.is_logged(step + 1))
        self._print_evaluation(step + 1, self._evaluation)
        self._evaluation = {}
        return metrics

    def inspect(self, examples: Sequence[TrainingExample], student: Student) -> None:
        """Compute the student's most likely tokens for the completions that will be written."""
        settings = self._config.logging
        for example in shown_examples(examples, settings.completions):
            rollout = example.rollout
            prompt = rollout.prompt_token_ids.tolist()
            completion = rollout.completion.token_ids[:DETAILED_TOKENS].tolist()
            likely = likely_tokens(student, prompt, completion, settings.top_k)
            if likely is not None:
                self._likely[id(example)] = likely

    def _write_completions(
        self,
        step: int,
        examples: Sequence[TrainingExample],
        losses: Mapping[str, LossMeasurements],
    ) -> None:
        settings = self._config.logging
        indices = {id(example): index for index, example in enumerate(examples)}
        lines: list[dict[str, Any]] = []
        for example in shown_examples(examples, settings.completions):
            index, likely = indices[id(example)], self._likely.get(id(example))
            line = logged_completion(
                step,
                example,
                {name: loss.per_example.get(index) for name, loss in losses.items()},
                student=None if likely is None else (self._student_table, likely),
                teachers=self._teacher_tables,
                top_k=settings.top_k,
            )
            lines.append(line)
        self._journal.write_completions(lines)
        self._likely = {}

    def _remaining(self, step: int, metrics: Metrics) -> Metrics:
        self._seconds += metrics["time/step"]
        per_step = self._seconds / (step + 1 - self._first_step)
        return {"time/remaining": per_step * (self._config.max_steps - step - 1)}

    def flush(self) -> None:
        """Write everything logged so far to the disk."""
        self._journal.settle()

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, traceback)
        self._journal.close()
