"""The training loop: the phases of a step, in order."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.rollouts.remote_sampler import RolloutWorkers
from mopd_trainer.setup import open_run


async def train(
    config: RunConfig,
    console: Console,
    *,
    prompts: Sequence[Prompt] | None = None,
    ranks: Ranks | None = None,
    workers: RolloutWorkers | None = None,
) -> Path:
    """Run a distillation; return the folder of the trained student.

    Each step samples completions, scores them with their teachers, aligns the tokens, packs
    micro-batches, updates the student, evaluates it if due, logs, saves a checkpoint if one is due,
    and pushes the weights to the sampler. With ``max_staleness`` the next steps are sampled and
    scored meanwhile.

    Every rank runs this loop. Rank 0 samples, scores, logs and saves; all ranks update, and gather
    the weights and optimizer state that rank 0 needs. Weights are pushed last, so that a failing
    push loses no step.

    Args:
        prompts: of ``config.data``, if already loaded; used on rank 0.
        ranks: the ranks of the student; default: this process.
        workers: processes that sample for the student; default: the student samples on rank 0.

    Raises:
        MopdError: when a setting, input, teacher or rank fails, possibly in an exception group; no
            file is left half-written.
        DegradationError: when the samples leave what the loss compares, with a checkpoint of the
            last step.
        Interrupted: after SIGINT, SIGTERM or SIGHUP, with a checkpoint of the last step. The
            current step is completed, or abandoned if it has not changed any weight.
    """
    async with open_run(config, console, prompts=prompts, ranks=ranks, workers=workers) as run:
        await run.evaluate(run.first_step)
        for step in range(run.first_step, config.max_steps):
            examples, dropped = await run.collect(step)  # sample, score, align
            run.record(step, examples)
            await run.inspect(step, examples)
            micro_batches, tokens = await run.pack(examples)
            update = await run.update(micro_batches, step=step, tokens=tokens, dropped=dropped)
            await run.evaluate(step + 1)
            metrics = run.log(step, examples, update, tokens=tokens, dropped=dropped)
            await run.check_degradation(step + 1, metrics)
            if run.is_checkpoint_due(step + 1):
                await run.save_checkpoint(step + 1)
            if step + 1 < config.max_steps:
                await run.push_weights(version=step + 1)
        return await run.save_student()
