"""The plan of a run, for reading before it starts: who, which hashes, from what, how much."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mopd_losses.config import described
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig, StudentConfig
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import Teacher

#: Bytes on the wire for one candidate: an int32 id and its logprob.
_CANDIDATE_BYTES = {"float32": 8, "float16": 6}


def describe_plan(
    config: RunConfig,
    prompts: Sequence[Prompt],
    student: StudentIdentity,
    teachers: Mapping[str, Teacher],
) -> Group:
    """The plan as something that ``rich`` prints."""
    table = [_teacher_table(config, prompts, student, teachers)] if teachers else []
    return Group(
        _student_line(config, student),
        *table,
        _source_line(config),
        _volume_line(config, prompts),
    )


def _student_line(config: RunConfig, student: StudentIdentity) -> Text:
    settings, table = config.student, student.table
    return Text(
        f"{config.exp_name}: student {settings.model}, {student.parameters / 1e6:,.2f} M "
        f"parameters{_adapted(settings, student)}, {settings.dtype} on {settings.device}, "
        f"tokenizer {table.fingerprint[:12]} of {table.size:,} ids, head of "
        f"{student.logit_width:,} rows, seed {config.seed}"
    )


def _adapted(settings: StudentConfig, student: StudentIdentity) -> str:
    if settings.lora is None:
        return ""
    share = student.trained / student.parameters
    return (
        f", of which LoRA of rank {settings.lora.rank} trains {student.trained / 1e6:,.2f} M "
        f"({share:.2%})"
    )


def _teacher_table(
    config: RunConfig,
    prompts: Sequence[Prompt],
    student: StudentIdentity,
    teachers: Mapping[str, Teacher],
) -> Table:
    lines = Counter(name for prompt in prompts for name in prompt.teachers)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, teacher in teachers.items():
        facts = _teacher_facts(teacher, student, lines[name])
        table.add_row(Text(f"teacher {name}"), Text(facts))  # a name is no markup
    return table


def _teacher_facts(teacher: Teacher, student: StudentIdentity, prompts: int) -> str:
    manifest, settings = teacher.manifest, teacher.config
    same = manifest.tokenizer_fingerprint == student.table.fingerprint
    reached = 1 - len(teacher.projection.unsupported_ids) / manifest.tokenizer_size
    temperature = "" if settings.temperature == 1 else f" at temperature {settings.temperature:g}"
    where = ", ".join(settings.url) + ("" if teacher.path is None else f" through {teacher.path}")
    if settings.local:
        where = f"{settings.model} in this process, asleep while the student writes and learns"
    support = {
        "teacher_topk": f"its top {settings.top_k}",
        "student_topk": f"the student's top {settings.top_k}",
        "full": "all ids",
    }[settings.support]
    return (
        f"{manifest.model} at {where}, manifest {manifest.manifest_id[:12]}\n"
        f"{manifest.engine} {manifest.engine_version}, {manifest.dtype}, tokenizer "
        f"{manifest.tokenizer_fingerprint[:12]} {'is' if same else 'is not'} the student's; "
        f"{reached:.0%} of its {manifest.tokenizer_size:,} ids in the student's reach\n"
        f"{described(settings.loss)}{temperature} on {support}, "
        f"weight {settings.weight:g}, {prompts:,} prompts"
    )


def _source_line(config: RunConfig) -> Text:
    share, weight = config.data.rollout_share, config.student.distill_loss_weight
    if config.replay is not None:
        return Text(f"every completion and its scores as {config.replay} recorded them")
    if share == 1:
        return Text("every completion is the student's own")
    whose = "every prompt" if share == 0 else f"{1 - share:.0%} of prompts"
    learnt = f"cross entropy {1 - weight:g}, distillation {weight:g}"
    if weight in (0, 1):
        learnt = "distillation alone" if weight else "cross entropy (SFT), read by no teacher"
    line = f"{whose} with a reference answer: {learnt}"
    if share > 0:
        line += "; the others with the student's own: distillation alone"
    unasked = ", ".join(name for name in config.teachers if name not in config.scoring_teachers)
    if unasked:
        line += f"; {unasked} not contacted (student.distill_loss_weight is 0)"
    return Text(line)


def _volume_line(config: RunConfig, prompts: Sequence[Prompt]) -> Text:
    rollout, share = config.rollout, config.data.rollout_share
    written = rollout.prompts_per_step * share * rollout.samples_per_prompt
    answers = rollout.prompts_per_step * (1 - share)
    judged = written + (answers if config.scores_reference_answers else 0)
    # Teachers may need more or fewer tokens for the same text: the student's count is the estimate.
    shares = Counter(name for prompt in prompts for name in prompt.teachers)
    asked = {
        name: teacher for name, teacher in config.scoring_teachers.items() if not teacher.local
    }
    wire = sum(
        judged
        * rollout.max_new_tokens
        * (shares[name] / len(prompts))
        * teacher.top_k
        * _CANDIDATE_BYTES[teacher.logprobs_dtype]
        for name, teacher in asked.items()
    )
    samples = round(written + answers)
    return Text(
        f"{config.max_steps:,} steps of {samples:,} completions from {len(prompts):,} prompts: at "
        f"most {samples * rollout.max_new_tokens:,} tokens and about {wire / 1e6:,.1f} MB of "
        f"scores a step; output in {config.output_dir}"
    )
