"""The plan of a run, for reading before it starts: who, which hashes, which loss, how much."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mopd_losses.config import described
from mopd_protocol.samples import Prompt
from mopd_trainer.config import RunConfig
from mopd_trainer.student_identity import StudentIdentity
from mopd_trainer.teachers import Teacher

#: Bytes on the wire for one candidate: an int32 id and its logprob.
_CANDIDATE_BYTES = {"float32": 8, "float16": 6}


def describe_plan(
    config: RunConfig,
    prompts: Sequence[Prompt],
    student: StudentIdentity,
    teachers: Mapping[str, Teacher],
) -> Group:
    """The plan as something that ``rich`` prints."""
    return Group(
        _student_line(config, student),
        _teacher_table(config, prompts, student, teachers),
        _volume_line(config, prompts),
    )


def _student_line(config: RunConfig, student: StudentIdentity) -> Text:
    settings, table = config.student, student.table
    return Text(
        f"{config.exp_name}: student {settings.model}, {student.parameters / 1e6:,.2f} M "
        f"parameters, {settings.dtype} on {settings.device}, tokenizer {table.fingerprint[:12]} "
        f"of {table.size:,} ids, head of {student.logit_width:,} rows, seed {config.seed}"
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
        table.add_row(f"teacher {name}", _teacher_facts(teacher, student, lines[name]))
    return table


def _teacher_facts(teacher: Teacher, student: StudentIdentity, prompts: int) -> str:
    manifest, settings = teacher.manifest, teacher.config
    same = manifest.tokenizer_fingerprint == student.table.fingerprint
    reached = 1 - len(teacher.projection.unsupported_ids) / manifest.tokenizer_size
    temperature = "" if settings.temperature == 1 else f" at temperature {settings.temperature:g}"
    return (
        f"{manifest.model} at {', '.join(settings.url)}, manifest {manifest.manifest_id[:12]}\n"
        f"{manifest.engine} {manifest.engine_version}, {manifest.dtype}, tokenizer "
        f"{manifest.tokenizer_fingerprint[:12]} {'is' if same else 'is not'} the student's; "
        f"{reached:.0%} of its {manifest.tokenizer_size:,} ids in the student's reach\n"
        f"{described(settings.loss)}{temperature} on its top "
        f"{settings.top_k}, weight {settings.weight:g}, {prompts:,} prompts"
    )


def _volume_line(config: RunConfig, prompts: Sequence[Prompt]) -> Text:
    rollout = config.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    tokens = samples * rollout.max_new_tokens
    # Teachers may need more or fewer tokens for the same text: the student's count is the estimate.
    shares = Counter(name for prompt in prompts for name in prompt.teachers)
    wire = sum(
        tokens
        * (shares[name] / len(prompts))
        * teacher.top_k
        * _CANDIDATE_BYTES[teacher.logprobs_dtype]
        for name, teacher in config.teachers.items()
    )
    return Text(
        f"{config.max_steps:,} steps of {samples:,} completions from {len(prompts):,} prompts: at "
        f"most {tokens:,} tokens and about {wire / 1e6:,.1f} MB of scores a step; "
        f"output in {config.output_dir}"
    )
