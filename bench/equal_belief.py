"""False loss: what a loss charges two models that are equally sure of one text.

    python -m bench.equal_belief --pairs tekken:v3,student.json:teacher.json --losses prefix_kl,ctkd

Each model gives every token of its tokenization of a text the same probability (0.999), and the
remaining mass to all other tokens equally. They agree about the text, so a divergence should be
close to zero, and its gradient should not push down the student's own tokens. Reported for each
pair, kind of text and loss: nats per student token, the share of the student's tokens whose
logit the loss pushes down (gradient of the sum above ``--threshold``), and the share that is
compared: a loss that compares nothing is no better for it.

A tokenizer is a name of ``tests/real_vocabularies.py`` (tekken, v1, v3, python_50k, …), a
``tokenizer.json``, or a folder that contains one.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.named_tokenizers import PAIRS, pairs_of, short_names, side
from mopd_losses import LossConfig, ProjectionCache
from mopd_trainer import equal_belief
from tests.real_vocabularies import STANDARD_LIBRARY

_CONFIG = TypeAdapter[LossConfig](LossConfig)

PROSE = (
    "The committee sat on Tuesday to discuss the town's new library, which had been delayed for "
    'three years. "We can\'t wait any longer," warned Mrs. Hargreaves; her neighbours agreed. '
    "Few remembered how it'd first been proposed, but the architect's drawings, torn, still "
    "hung in the hallway. Several thousand euros were missing.\n\n"
)
CJK = (
    "你好,世界。床前明月光,疑是地上霜。漢字仮名交じり文:カタカナ、ひらがな。"
    "今天的天气很好,我们去公园散步吧。東京都の人口は約1400万人です。안녕하세요 세계!"
)
#: Words of which a token of one vocabulary is many of another.
SCRIPTS = (
    "प्रधानमंत्री ने विश्वविद्यालयों के प्रतिनिधियों को संबोधित किया। "
    "Правительство утвердило государственную программу развития здравоохранения. "
    "أعلنت وزارة التربية والتعليم عن بدء العام الدراسي الجديد في جميع المدارس. "
    "สวัสดีครับ วันนี้อากาศดีมาก เราไปเดินเล่นที่สวนสาธารณะกันเถอะ "
    "Những người nghiên cứu trường đại học đã phát triển một phương pháp mới. "
)


@dataclass(frozen=True)
class Result:
    """One loss on one pair and text."""

    student: str
    teacher: str
    text: str
    loss: str
    tokens: int
    nats_per_token: float
    pushed_down: float  # share of tokens
    worst_nats: float  # of one token
    compared: float  # share of tokens


def main() -> None:
    """Print and store a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", default=PAIRS, metavar="STUDENT:TEACHER,…", help="tokenizers")
    every_text = texts()
    kinds = ",".join(every_text)
    parser.add_argument("--texts", default=kinds, metavar="A,B", help=f"kinds, of {kinds}")
    parser.add_argument("--losses", default="prefix_kl,ctkd", metavar="A,B", help="by type")
    parser.add_argument("--confidence", type=float, default=0.999, help="of each token")
    parser.add_argument("--threshold", type=float, default=0.1, help="nats per unit of logit")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the figures go")
    options = parser.parse_args()
    names, losses = options.texts.split(","), options.losses.split(",")
    pairs = pairs_of(parser, options.pairs)
    if unknown := [name for name in names if name not in every_text]:
        parser.error(f"--texts: unknown {', '.join(unknown)}, expected some of {kinds}")
    for loss in losses:
        try:
            _CONFIG.validate_python({"type": loss})
        except ValidationError as error:
            parser.error(f"--losses: {error.errors()[0]['msg']}")
    results = [
        measure(
            *pair,
            name,
            every_text[name],
            loss,
            confidence=options.confidence,
            threshold=options.threshold,
        )
        for pair, loss, name in track(
            [*product(pairs, losses, names)],
            "pairs, losses and texts",
            console=Console(stderr=True),
            transient=True,
        )
    ]
    columns = ("student", "teacher", "loss", "text", "tokens", "nats/token", "pushed", "compared")
    table = Table(*columns, box=box.SIMPLE, padding=0)
    shorts = short_names(name for pair in pairs for name in pair)
    for result in results:
        table.add_row(
            shorts[result.student],
            shorts[result.teacher],
            result.loss,
            result.text,
            str(result.tokens),
            f"{result.nats_per_token:.4f}",
            f"{result.pushed_down:.1%}",
            f"{result.compared:.1%}",
        )
    console = Console()
    console.print(table)
    for loss in losses:
        of_loss = [result for result in results if result.loss == loss]
        console.print(summary(loss, of_loss), highlight=False)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


def summary(loss: str, results: Sequence[Result]) -> str:
    """Return a sentence about the largest values of a loss."""
    worst = max(results, key=lambda each: each.nats_per_token)
    above = sum(each.nats_per_token > 0.01 for each in results)
    pushed = sum(each.pushed_down > 0 for each in results)
    shorts = short_names(name for each in results for name in (each.student, each.teacher))
    return (
        f"{loss}: at most {worst.nats_per_token:.4f} nats a token ({worst.text}, student "
        f"{shorts[worst.student]}, teacher {shorts[worst.teacher]}); {above} of "
        f"{len(results)} texts above 0.01, {pushed} with a token that is pushed down, at least "
        f"{min(each.compared for each in results):.0%} compared"
    )


def texts() -> dict[str, str]:
    """Texts of six kinds."""
    chance = random.Random(0)
    records = [
        {"id": i, "name": f"user_{i}", "tags": ["a", "b"], "value": chance.random(), "ok": None}
        for i in range(8)
    ]
    source = (STANDARD_LIBRARY / "bisect.py").read_text(encoding="utf-8")[:1_500]
    loop = "\n\nfor (int i = 0; i < n; ++i) {\n\t\tif (!ok) {\n\t\t\treturn;\n\t\t}\n}\n\n"
    return {
        "prose": PROSE * 2,
        "code": source + loop,
        "numbers": " ".join(
            str(chance.randrange(10 ** chance.randrange(1, 8))) for _ in range(150)
        ),
        "json": json.dumps(records, indent=2),
        "cjk": CJK * 2,
        "scripts": SCRIPTS * 2,
    }


def measure(
    student: str,
    teacher: str,
    name: str,
    text: str,
    loss_type: str,
    *,
    confidence: float,
    threshold: float,
) -> Result:
    """One loss on one text."""
    sides = side(student), side(teacher)
    config = _CONFIG.validate_python({"type": loss_type})
    left, right = (each.table.sequence(each.encoder.encode(text)) for each in sides)
    belief = equal_belief(
        config,
        *sides,
        (left, right),
        confidence=confidence,
        threshold=threshold,
        cache=_projections(),
    )
    nats = np.nan_to_num(belief.nats)
    return Result(
        student=student,
        teacher=teacher,
        text=name,
        loss=loss_type,
        tokens=len(left),
        nats_per_token=float(nats.sum()) / len(left),
        pushed_down=float(belief.pushed_down.mean()),
        worst_nats=float(nats.max()),
        compared=float(belief.compared.mean()),
    )


@cache
def _projections() -> ProjectionCache:
    return ProjectionCache()


if __name__ == "__main__":
    main()
