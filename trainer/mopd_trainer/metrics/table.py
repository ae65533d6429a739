"""The table of metrics: name pattern -> unit and meaning.

Journal, TensorBoard, report and documentation use these names. Counters of events, such as
``retries``, are only written where they are not zero. ``{teacher}`` and ``{reason}`` stand
for any teacher and any reason. NaN (``null`` in the journal) means not measured.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache


@dataclass(frozen=True)
class MetricRow:
    """A metric, or a pattern of metrics."""

    name: str
    unit: str
    meaning: str


#: Metrics that count events; one that is zero in a step is not written.
_EVENTS = frozenset(
    (
        *("retries", "failures", "breaker_openings", "waits", "fallbacks", "worker_restarts"),
        "rejected_replicas",
        *("cache_hits", "cache_misses", "cache_corrupt", "cache_unwritten"),
        *("control_tokens_as_text", "invalid_utf8_bytes"),
        *("skipped_nonfinite", "skipped_grad_norm", "skipped_empty"),
    )
)
#: Metrics of the clock, the process and the network, which differ between two identical runs. A
#: response contains the seconds that it took, so that its size differs by a few bytes.
NOT_REPRODUCED = (
    "time/*",
    "throughput/*",
    "memory/*",
    "teacher/*/score_seconds_*",
    "teacher/*/received_bytes",
    "teacher/*/replicas",
    "teacher/*/busiest_replica",
)
_NATS = "nats/token"
_SHARE = "share"

_RUN = {
    "loss": (
        "nats/compared token",
        "weighted loss of the step over its compared tokens, without importance weights",
    ),
    "compared_share": (
        _SHARE,
        "completion tokens that are compared with a teacher or a reference answer; a fall means "
        "that the student leaves the text on which the loss is defined",
    ),
    "objective": (
        _NATS,
        "what the update minimises: the loss over all tokens, with all weights",
    ),
    "grad_norm": ("", "norm of the gradient before clipping"),
    "learning_rate": ("", "learning rate of the step"),
    "tokens/trained": ("tokens", "completion tokens of the step"),
    "sft/loss_per_token": (_NATS, "cross entropy of the reference answers"),
    "reward/{reward}": (_SHARE, "mean of a reward over the graded completions"),
    "reinforcement/spread_share": (
        _SHARE,
        "groups of a prompt whose completions differ in a reward; the others have no advantage",
    ),
    "reinforcement/clipped_share": (_SHARE, "tokens whose importance ratio is clipped"),
    "reinforcement/importance_ratio_mean": (
        "",
        "probability now over probability when sampled, of the tokens with an advantage",
    ),
    "update/skipped_nonfinite": ("0/1", "step skipped: loss or gradient is not finite"),
    "update/skipped_grad_norm": ("0/1", "step skipped: gradient norm above the limit"),
    "update/skipped_empty": ("0/1", "step skipped: no samples"),
    "rollout/samples": ("samples", "sampled completions trained on"),
    "rollout/tokens": ("tokens", "tokens of the sampled completions"),
    "rollout/completion_tokens_mean": ("tokens", "mean length of a sampled completion"),
    "rollout/completion_tokens_min": ("tokens", "length of the shortest sampled completion"),
    "rollout/completion_tokens_p50": ("tokens", "median length of a sampled completion"),
    "rollout/completion_tokens_p95": ("tokens", "95th percentile of the length"),
    "rollout/completion_tokens_max": ("tokens", "length of the longest sampled completion"),
    "rollout/entropy": (
        _NATS,
        "mean surprisal of the sampled tokens under the sampling distribution: an unbiased "
        "estimate of its entropy",
    ),
    "rollout/corrected_share": (
        _SHARE,
        "sampled completions that a teacher corrected (rollout.corrections)",
    ),
    "rollout/truncated_share": (_SHARE, "sampled completions cut by max_new_tokens"),
    "rollout/finished_share": (_SHARE, "sampled completions finished with an ending token"),
    "rollout/invalid_byte_share": (_SHARE, "sampled bytes that are not valid UTF-8"),
    "rollout/entropy_per_byte": (
        "nats/byte",
        "surprisal of the sampled tokens: an estimate of the student's entropy at the sampling "
        "temperature",
    ),
    "rollout/teacher_entropy_per_byte": (
        "nats/byte",
        "teachers' entropy on the sampled completions, from their top-k, at the student's sampling "
        "temperature",
    ),
    "rollout/teacher_end_surprisal": ("nats", "teachers' surprisal that a completion ends"),
    "rollout/worker_restarts": ("restarts", "rollout workers restarted after a crash"),
    "staleness/mean": ("steps", "mean age of the sampled completions in policy versions"),
    "staleness/max": ("steps", "largest age of a sampled completion in policy versions"),
    "answers/samples": ("samples", "reference answers trained on"),
    "answers/tokens": ("tokens", "tokens of the reference answers"),
    "answers/completion_tokens_mean": ("tokens", "mean length of a reference answer"),
    "dropped/total": ("samples", "samples dropped, each counted once"),
    "dropped/stale": ("samples", "samples dropped as older than max_staleness"),
    "dropped/truncated": ("samples", "samples that reached max_new_tokens (rollout.truncated)"),
    "dropped/not_distilled": (
        "samples",
        "samples that rewards.NAME.distill excludes, without a reward that has a weight",
    ),
    "dropped/no_spread": (
        "samples",
        "samples without a score, of groups without spread (reinforcement.filter_groups)",
    ),
    "dropped/prompt_too_long": ("samples", "prompts without room for a completion"),
    "dropped/answer_too_long": ("samples", "reference answers too long for the student"),
    "dropped/agent_failed": ("trajectories", "trajectories whose agent failed"),
    "dropped/no_turn": ("trajectories", "trajectories without a turn of the student"),
    "dropped/turn_rejected": ("samples", "reference turns that the student's template changes"),
    "dropped/nothing_aligned": ("samples", "replayed samples without an aligned token"),
    "dropped/{teacher}/{reason}": (
        "samples",
        "samples that a teacher could not score: refused, too_long, unavailable, nothing_aligned",
    ),
    "time/sample": ("s", "time with sampling in progress"),
    "time/score": ("s", "time with scoring in progress"),
    "time/wait": ("s", "time with scoring but no sampling in progress"),
    "time/train": ("s", "time of the update"),
    "time/evaluate": ("s", "time of an evaluation, in the step after whose update it is made"),
    "time/evaluate_share": (_SHARE, "time of the evaluation since the end of the previous one"),
    "time/push": ("s", "time to push the weights to the sampler, in the step after the update"),
    "time/step": ("s", "time since the previous step"),
    "throughput/sample": ("tokens/s", "sampled tokens per second of time/sample"),
    "throughput/score": ("tokens/s", "tokens scored by all teachers per second of time/score"),
    "throughput/train": ("tokens/s", "trained completion tokens per second of time/train"),
    "memory/peak_bytes": ("bytes", "largest resident memory of this process so far"),
    "memory/peak_device_bytes": ("bytes", "largest allocated memory of the accelerator so far"),
    "time/remaining": ("s", "mean time of the steps of this part of the run times the rest"),
    "time/hidden_share": (_SHARE, "scoring time that overlaps with sampling"),
}

_TEACHER = {
    "loss": ("nats/compared token", "unweighted loss over the compared tokens"),
    "compared_share": (_SHARE, "student tokens that are compared with the teacher"),
    "loss_per_token": (_NATS, "unweighted loss over the student's tokens"),
    "loss_per_byte": ("nats/byte", "unweighted loss over the bytes of the completions"),
    "importance_weight_mean": (
        "",
        "mean importance weight of the student's tokens; near 1, the teacher finds the samples as "
        "plausible as the student does",
    ),
    "copied_share": (
        _SHARE,
        "8-grams of bytes of sampled completions that only the teacher's own prompt has; a rise "
        "means that the student repeats privileged text instead of learning from it",
    ),
    "tokens": ("tokens", "student tokens of the scored completions"),
    "token_fraction": (_SHARE, "share of the step's tokens, weighted by the teacher's share"),
    "entropy_low": (_NATS, "entropy of the teacher's distribution if its tail is one id"),
    "entropy_high": (_NATS, "entropy of the teacher's distribution if its tail is uniform"),
    "reverse_kl_estimate": (
        _NATS,
        "log-probability of the sampled completions under the student minus that under the "
        "teacher, over the student's tokens: an estimate of KL(student, teacher) with both "
        "at the sampling temperature, also across tokenizers",
    ),
    "implausible_share": (
        _SHARE,
        "tokens of sampled completions, in the teacher's tokens, that are less than 1 % as likely "
        "as the teacher's likeliest one; falls with any loss as the student learns",
    ),
    "topk_mass_mean": (_SHARE, "coverage: the teacher's probability of the ids that it returned"),
    "topk_mass_p1": (_SHARE, "1st percentile of the coverage; a low one means a small top_k"),
    "control": ("1", "present if the teacher is a control arm (teachers.NAME.control)"),
    "alignment_ratio": (_SHARE, "bytes of the completions in aligned spans"),
    "control_tokens_as_text": ("tokens", "control tokens sent as text"),
    "invalid_utf8_bytes": ("bytes", "bytes not sent: not UTF-8, and in no token"),
    "lookaheads": ("texts", "texts beyond the completions that prefix KL compares"),
    "scored_tokens": ("tokens", "completion tokens scored, in the teacher's tokens"),
    "received_bytes": ("bytes", "size of the response bodies"),
    "score_seconds_total": ("s", "sum of the times of all requests"),
    "score_seconds_p50": ("s", "median time of a request, with retries"),
    "score_seconds_p95": ("s", "95th percentile of the time of a request, with retries"),
    "retries": ("requests", "repeated requests"),
    "failures": ("calls", "failed or cancelled calls"),
    "breaker_openings": ("openings", "circuit breakers opened by consecutive failures"),
    "rejected_replicas": ("replicas", "discovered replicas that serve another model"),
    "replicas": ("replicas", "replicas that requests were sent to, if several"),
    "busiest_replica": ("", "tokens of the replica that scored most, over the mean of replicas"),
    "cache_hits": ("sequences", "scores loaded from disk"),
    "cache_misses": ("sequences", "scores not found on disk"),
    "cache_corrupt": ("files", "unreadable files of scores"),
    "cache_unwritten": ("scores", "scores not saved because of a disk error"),
    "waits": ("waits", "waits for an unavailable teacher"),
    "fallbacks": ("samples", "samples scored by the fallback teacher"),
    "teacher_mass_mean": (_SHARE, "teacher probability of the compared ids or texts"),
    "student_mass_mean": (_SHARE, "student probability of the compared ids or texts"),
    "unsupported_mass_mean": (_SHARE, "teacher probability of ids without a student id"),
    "unprojected_mass_mean": (_SHARE, "student probability of ids without a teacher id"),
    "path_mass_mean": (_SHARE, "teacher probability of the prefix of an event"),
    "student_path_mass_mean": (_SHARE, "student probability of the prefix of an event"),
    "path_weight_mean": ("", "weight of an event"),
    "student_surprisal_mean": ("nats", "student surprisal of a span"),
    "teacher_surprisal_mean": ("nats", "teacher surprisal of a span"),
    "matched_mean": ("nats", "loss on the ids of both vocabularies"),
    "unmatched_mean": ("", "loss on the ids of one vocabulary"),
    "teacher_matched_mass_mean": (_SHARE, "teacher probability of the ids of both vocabularies"),
    "student_matched_mass_mean": (_SHARE, "student probability of the ids of both vocabularies"),
    "teacher_span_mass_mean": (_SHARE, "teacher probability of the completion's own span"),
    "student_span_mass_mean": (_SHARE, "student probability of the completion's own span"),
    "teacher_rest_mean": (_SHARE, "teacher probability outside its top-k"),
    "log_ratio_mean": ("nats", "student's logprob minus the teacher's of the sampled spans"),
    "importance_ratio_mean": ("", "probability now over probability when sampled"),
    "clipped_mean": (_SHARE, "spans with a clipped importance ratio"),
    "ruled_out_mean": (_SHARE, "spans that one model gives probability zero"),
}


_EVALUATION = {
    "accuracy": (_SHARE, "mean score of the greedy completions"),
    "accuracy_low": (_SHARE, "lower bound of the 95 % interval of the accuracy (Wilson)"),
    "accuracy_high": (_SHARE, "upper bound of the 95 % interval of the accuracy (Wilson)"),
    "tokens_mean": ("tokens", "mean length of a greedy completion"),
    "finished_share": (_SHARE, "greedy completions finished with an ending token"),
    "sampled_accuracy": (_SHARE, "mean score of the sampled completions"),
    "sampled_accuracy_low": (_SHARE, "lower bound of its interval; a prompt is one trial"),
    "sampled_accuracy_high": (_SHARE, "upper bound of its interval; a prompt is one trial"),
    "sampled_tokens_mean": ("tokens", "mean length of a sampled completion"),
    "sampled_finished_share": (_SHARE, "sampled completions finished with an ending token"),
    "pass_at_{k}": (_SHARE, "probability that one of k samples has score 1, unbiased estimate"),
    "bits_per_byte": ("bits/byte", "negative log-likelihood of the reference answers"),
    "source/{source}/accuracy": (_SHARE, "accuracy on the lines of a data source"),
    "source/{source}/sampled_accuracy": (_SHARE, "sampled accuracy on the lines of a data source"),
    "source/{source}/bits_per_byte": ("bits/byte", "bits per byte on the lines of a data source"),
    "gap_closed/{teacher}": (
        _SHARE,
        "(student - before) / (teacher - before), of accuracy or bits per byte",
    ),
    "sampled_gap_closed/{teacher}": (_SHARE, "the same of the sampled accuracy"),
    "teacher/{teacher}/{metric}": ("", "a metric above of a teacher, in the first evaluation"),
}


def without_zero_events(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without counters of events that are zero."""
    return {k: v for k, v in metrics.items() if v or k.rpartition("/")[2] not in _EVENTS}


def is_reproduced(name: str) -> bool:
    """Return True if two identical runs, one of them resumed or not, have the same value.

    Counters of failures, retries and stored scores are the same if none fails and none is stored.
    """
    return not any(fnmatchcase(name, pattern) for pattern in NOT_REPRODUCED)


def metric_rows() -> Iterator[MetricRow]:
    """Yield every row, in the order of the documentation."""
    for name, (unit, meaning) in _RUN.items():
        yield MetricRow(name, unit, meaning)
    for name, (unit, meaning) in _EVALUATION.items():
        yield MetricRow(f"evaluation/{{set}}/{name}", unit, meaning)
    for name, (unit, meaning) in _TEACHER.items():
        yield MetricRow(f"teacher/{{teacher}}/{name}", unit, meaning)


def metric_row(name: str) -> MetricRow | None:
    """Return the row of a metric by its name in a journal; None if it is not in the table."""
    matches = (row for row in metric_rows() if _pattern(row.name).fullmatch(name))
    return next(matches, None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", name)
    return re.compile(".+".join(re.escape(part) for part in parts))
