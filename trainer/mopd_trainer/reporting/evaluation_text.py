"""Results of an evaluation as text: one line per model on the console."""

from collections.abc import Iterator, Mapping

from mopd_trainer.evaluation.metric_names import by_model


def evaluation_lines(metrics: Mapping[str, float | None]) -> Iterator[str]:
    """Yield a line for the student, and one for each teacher that was evaluated.

    Example: ``sums 45.0% (38.2-52.0), sampled 31.5%, gap closed 46%``.
    """
    models = by_model(metrics)
    for model in sorted(models):  # the student first
        sets = "; ".join(set_text(name, values) for name, values in models[model].items())
        yield f"{f'teacher {model}' if model else 'student'}: {sets}"


def set_text(name: str, values: Mapping[str, float]) -> str:
    """Return the main results of a model on a set."""
    parts: list[str] = []
    for prefix, label in (("", ""), ("sampled_", "sampled ")):
        if f"{prefix}accuracy" in values:
            share, low, high = (values[f"{prefix}accuracy{end}"] for end in ("", "_low", "_high"))
            parts.append(f"{label}{share:.1%} ({100 * low:.1f}-{100 * high:.1f})")
    if "bits_per_byte" in values:
        parts.append(f"{values['bits_per_byte']:.4f} bits per byte")
    passes = {int(k.removeprefix("pass_at_")): v for k, v in values.items() if "pass_at_" in k}
    if passes:
        parts.append(f"pass@{max(passes)} {passes[max(passes)]:.1%}")
    gaps = {k: v for k, v in values.items() if k.startswith("gap_closed/")}
    for key, closed in gaps.items():
        if closed == closed:  # NaN: the teacher was not better
            of = f" to {key.removeprefix('gap_closed/')}" if len(gaps) > 1 else ""
            parts.append(f"gap{of} closed {closed:.1%}")
    return f"{name} {', '.join(parts)}"
