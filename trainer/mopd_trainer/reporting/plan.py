"""Resolved plan of a run: student, teachers with their hashes, losses, data and volume."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mopd_losses.config import AutoConfig, described
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig, StudentConfig
from mopd_trainer.config.teacher import PROMPT_SETTINGS
from mopd_trainer.data.formats import FORMATS, LAST_MESSAGE
from mopd_trainer.run_folder.disk_space import checkpoint_size, kept_checkpoints, peak_space
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import Teacher
from mopd_trainer.teachers.local.manifest import self_weights

#: Bytes per candidate in a response: an int32 id and a logprob.
_CANDIDATE_BYTES = {"float32": 8, "float16": 6}


def describe_plan(
    config: RunConfig,
    prompts: Sequence[Prompt],
    student: StudentIdentity,
    teachers: Mapping[str, Teacher],
) -> Group:
    """Return the plan as a renderable of ``rich``."""
    table = [_teacher_table(config, prompts, student, teachers)] if teachers else []
    return Group(
        _student_line(config, student),
        *table,
        *_data_lines(config, prompts),
        _source_line(config),
        _volume_line(config, prompts),
        _disk_line(config, student),
    )


def selected_losses(teachers: Mapping[str, Teacher]) -> list[str]:
    """Return one line for each teacher: its loss, also where ``auto`` has selected it."""
    return [f"teacher {name}: loss {described(t.config.loss)}" for name, t in teachers.items()]


def _student_line(config: RunConfig, student: StudentIdentity) -> Text:
    settings, table = config.student, student.table
    return Text(
        f"{config.exp_name}: student {settings.model}, {student.parameters / 1e6:,.2f} M "
        f"parameters{_adapted(settings, student)}, {settings.dtype} on {settings.device}, "
        f"tokenizer {table.fingerprint[:12]} of {table.size:,} ids, head of "
        f"{student.logit_width:,} rows, seed {config.seed}{_dropout(settings, student)}"
    )


def _dropout(settings: StudentConfig, student: StudentIdentity) -> str:
    if not student.dropout:
        return ""
    values = ", ".join(f"{name} {value:g}" for name, value in student.dropout.items())
    used = "in training" if settings.dropout == "model" else "off"
    return f"; dropout of the model ({values}): {used} (student.dropout={settings.dropout})"


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
        automatic = name in config.teachers and isinstance(config.teachers[name].loss, AutoConfig)
        facts = _teacher_facts(teacher, student, lines[name], automatic=automatic)
        facts += _own_prompt(name, teacher, prompts)
        table.add_row(Text(f"teacher {name}"), Text(facts))  # Text: names are not markup
    return table


def _teacher_facts(
    teacher: Teacher, student: StudentIdentity, prompts: int, *, automatic: bool
) -> str:
    manifest, settings = teacher.manifest, teacher.config
    same = manifest.tokenizer_fingerprint == student.table.fingerprint
    sharing = "shared with the student" if same else "different from the student's"
    reached = 1 - len(teacher.projection.unsupported_ids) / manifest.tokenizer_size
    temperature = "" if settings.temperature == 1 else f" at temperature {settings.temperature:g}"
    where = ", ".join(settings.url) + ("" if teacher.path is None else f" through {teacher.path}")
    if settings.local:
        where = f"{settings.model} in this process, offloaded during sampling and training"
    if settings.kind == "self":
        where = f"the student itself, weights {self_weights(settings).removeprefix('+')}"
    if settings.placement == "stored":
        where = f"{settings.scores}, stored scores"
    support = {
        "teacher_topk": f"the teacher's top {settings.top_k}",
        "student_topk": f"the student's top {settings.top_k}",
        "full": "all ids",
    }[settings.support]
    selected = ", selected by loss 'auto'" if automatic else ""
    ends = teacher.differing_ends()
    ends = "" if ends is None else f"\n{ends}"
    control = "" if settings.control is None else f"\nCONTROL ARM: {settings.control} scores"
    return (
        f"{manifest.model} at {where}, manifest {manifest.manifest_id[:12]}\n"
        f"{manifest.engine} {manifest.engine_version}, {manifest.dtype}, tokenizer "
        f"{manifest.tokenizer_fingerprint[:12]} {sharing}; "
        f"{reached:.0%} of {manifest.tokenizer_size:,} teacher ids map to student ids\n"
        f"{described(settings.loss)}{temperature} on {support}, "
        f"weight {settings.weight:g}, {prompts:,} prompts{selected}{ends}{control}"
    )


def _own_prompt(name: str, teacher: Teacher, prompts: Sequence[Prompt]) -> str:
    """Return a line on the prompts that a teacher does not share with the student; may be empty."""
    count = sum(name in prompt.teacher_messages for prompt in prompts)
    if not count:
        return ""
    settings = {key: getattr(teacher.config, key) for key in PROMPT_SETTINGS}
    named = [f"{key} {value!r:.60}" for key, value in settings.items() if value is not None]
    described = f" ({', '.join(named)})" if named else ""
    return f"\nown prompt, which the student does not see, in {count:,} lines{described}"


def _data_lines(config: RunConfig, prompts: Sequence[Prompt]) -> list[Text]:
    """Return the recognised formats, what their reference answers are for, and a warning."""
    formats, lines = Counter(prompt.format for prompt in prompts if prompt.format), list[Text]()
    if formats:
        counts = [f"{count:,} of format {name}" for name, count in formats.items()]
        lines.append(Text(f"data {config.data.prompts}: {', '.join(counts)}"))
    references = sum(bool(prompt.metadata) for prompt in prompts)
    is_used = config.data.uses_reference_answers or config.rewards
    if formats and references and not is_used:
        lines[0].append(
            f"; the reference answers of {references:,} prompts "
            f"({_references(config, formats)}) are logged, not trained on (data.source: answers "
            "trains on them)"
        )
    per_step = config.rollout.prompts_per_step
    if per_step > len(prompts):
        lines.append(
            Text(
                f"warning: prompts repeat within a step (found {len(prompts):,} prompts, expected "
                f"at least rollout.prompts_per_step {per_step:,}). Set rollout.prompts_per_step="
                f"{len(prompts)}, and rollout.samples_per_prompt for more completions."
            )
        )
    return lines


def _references(config: RunConfig, formats: Iterable[str]) -> str:
    if config.data.answer_key is not None:
        return repr(config.data.answer_key)
    references = {each.name: each.reference for each in FORMATS}
    return ", ".join(sorted({references.get(name, LAST_MESSAGE) for name in formats}))


def _source_line(config: RunConfig) -> Text:
    share, weight = config.data.rollout_share, config.student.distill_loss_weight
    if config.replay is not None:
        return Text(f"replay: completions and scores recorded by {config.replay}")
    rounds, temperature = config.rollout.corrections, config.rollout.temperature
    details = "" if temperature == 1 else f", sampled at temperature {temperature:g}"
    agent = config.rollout.agent
    if agent is not None:
        details += f", at most {agent.max_turns} turns with {agent.function}"
    times = "once" if rounds == 1 else f"{rounds} times"
    details += f", corrected at most {times} by teachers" if rounds else ""
    least = config.importance.least_weight
    details += f", importance weights of at least {least:g}" if least < 1 else ""
    names = ", ".join(f"{name} {each.weight:g}" for name, each in config.rewards.items())
    details += f", rewards: {names}" if names else ""
    if share == 1:
        return Text(f"100 % on-policy{details}")
    objective = f"cross entropy {1 - weight:g}, distillation {weight:g}"
    if weight in (0, 1):
        objective = "distillation only" if weight else "cross entropy only (SFT)"
    line = f"{1 - share:.0%} of prompts with reference answers: {objective}"
    if share > 0:
        line += f"; {share:.0%} on-policy: distillation only{details}"
    unused = ", ".join(name for name in config.teachers if name not in config.scoring_teachers)
    if unused:
        line += f"; {unused} not contacted (student.distill_loss_weight is 0)"
    return Text(line)


def size_text(size: int) -> str:
    """Return bytes as ``4.5 GB`` or ``12 MB``."""
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"


def _disk_line(config: RunConfig, student: StudentIdentity) -> Text:
    kept, size = kept_checkpoints(config), checkpoint_size(config, student.trained)
    return Text(
        f"disk: {kept:,} checkpoint{'' if kept == 1 else 's'} of {size_text(size)} "
        f"(keep_checkpoints, save_steps); with the trained model at most "
        f"{size_text(peak_space(config, student.trained))} while saving, without logs"
    )


def _volume_line(config: RunConfig, prompts: Sequence[Prompt]) -> Text:
    rollout, share = config.rollout, config.data.rollout_share
    turns = 1 if rollout.agent is None else rollout.agent.max_turns
    sampled = rollout.prompts_per_step * share * rollout.samples_per_prompt * turns
    references = rollout.prompts_per_step * (1 - share)
    scored = sampled + (references if config.scores_reference_answers else 0)
    # An estimate: teachers may need more or fewer tokens than the student.
    shares = Counter(name for prompt in prompts for name in prompt.teachers)
    services = {
        name: teacher
        for name, teacher in config.scoring_teachers.items()
        if teacher.placement in ("url", "ray")
    }
    wire = sum(
        scored
        * rollout.max_new_tokens
        * (shares[name] / len(prompts))
        * teacher.top_k
        * _CANDIDATE_BYTES[teacher.logprobs_dtype]
        for name, teacher in services.items()
    )
    samples, most = round(sampled + references), "at most " if turns > 1 else ""
    return Text(
        f"{config.max_steps:,} steps of {most}{samples:,} completions from {len(prompts):,} "
        f"prompts: at most {samples * rollout.max_new_tokens:,} tokens and about "
        f"{wire / 1e6:,.1f} MB of scores per step; output in {config.output_dir}"
    )
