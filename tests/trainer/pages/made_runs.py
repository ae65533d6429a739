"""Run folders that were not trained: any journal, and completions of two tokenizers."""

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL

Line = Mapping[str, Any]
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")


def write_run(folder: Path, journal: Iterable[Line], completions: Iterable[Line] = ()) -> Path:
    """Write a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    append(folder / JOURNAL, journal)
    append(folder / COMPLETIONS, completions)
    return folder


def append(path: Path, lines: Iterable[Line]) -> None:
    """Append lines of JSON."""
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def journal(steps: int, *, first: int = 1, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return lines of a run with two teachers, and an evaluation every tenth step."""
    lines: list[dict[str, Any]] = []
    for step in range(first, first + steps):
        loss = scale * (0.1 + 2 * math.exp(-step / 200))
        teachers = {
            f"teacher/{name}/{key}": value
            for number, name in enumerate(("math", "code"))
            for key, value in {
                "loss": loss * (1 + number / 2),
                "compared_share": 0.9,
                "entropy_low": 0.5 + number,
                "entropy_high": 0.8 + number,
                "score_seconds_p50": 0.1,
                "score_seconds_p95": 0.2,
                "scored_tokens": 100.0,
                "received_bytes": 1e4,
            }.items()
        }
        if step % 7 == 0:
            teachers["teacher/code/retries"] = 2.0
        evaluation: dict[str, float] = {}
        if step % 10 == 0:
            share = 1 - math.exp(-step / 400)
            ends = {"": share, "_low": share * 0.9, "_high": min(1.0, share * 1.1)}
            evaluation = {f"evaluation/sums/accuracy{end}": value for end, value in ends.items()}
            evaluation["evaluation/sums/gap_closed/math"] = share
        line = {"step": step, "loss": loss, "compared_share": 0.9, "rollout/entropy": loss / 2}
        phases = {"time/step": 2.0, "time/sample": 1.2, "time/train": 0.7, "time/remaining": 60.0}
        lines.append({**line, "grad_norm": 1.0, **phases, **teachers, **evaluation})
    return lines


def completion(
    text: Sequence[bytes], teacher: str = "math", nats: float = 1.0, step: int = 1, **changes: Any
) -> dict[str, Any]:
    """Return a completion whose first two tokens are one token of the teacher."""
    joined = [b"".join(text[:2]), *text[2:]]
    top = {
        "logprobs": [-0.1] * len(text),
        "top_ids": [[100 + index, 7] for index in range(len(text))],
        "top_logprobs": [[-0.1, -3.0]] * len(text),
        "spellings": {
            "7": "<<|end|>>",
            **{str(100 + index): piece.hex() for index, piece in enumerate(text)},
        },
    }
    return {
        "step": step,
        "prompt": [
            {"role": "user", "content": f"repeat {b''.join(text).decode('utf-8', 'replace')}"}
        ],
        "completion": b"".join(text).decode("utf-8", "replace"),
        "source": "rollout",
        "policy_version": step - 1,
        "finish_reason": "stop",
        "teachers": {teacher: 1.0},
        "metadata": {},
        "tokens": {
            "count": len(text),
            "ids": [100 + index for index in range(len(text))],
            "bytes": [piece.hex() for piece in text],
            "marks": {},
            **top,
        },
        "nats": {teacher: [None, *(nats * index for index in range(1, len(text)))]},
        "scores": {
            teacher: {
                "count": len(joined),
                "ids": [200 + index for index in range(len(joined))],
                "bytes": [piece.hex() for piece in joined],
                "marks": {},
                "chunks": [[2, 1], len(joined) - 1],
                "logprobs": [-0.2] * len(joined),
                "top_ids": [[200 + index, 9] for index in range(len(joined))],
                "top_logprobs": [[-0.2, -2.0]] * len(joined),
                "spellings": {
                    "9": b" other".hex(),
                    **{str(200 + index): piece.hex() for index, piece in enumerate(joined)},
                },
            }
        },
        **changes,
    }


def completions(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return completions of two teachers, in the order of their steps."""
    chance = random.Random(seed)
    return [
        completion(
            [word.encode() for word in chance.choices(WORDS, k=6)],
            teacher=("math", "code")[number % 2],
            nats=chance.random(),
            step=1 + number // 2,
        )
        for number in range(count)
    ]
