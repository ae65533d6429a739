"""The next bytes of a language model: mass that the sampled tokens' rows miss, and extra rows.

    python -m bench.next_bytes --model MODEL --folder DIR
    python -m bench.next_bytes --model FOLDER --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf \
        --folder DIR

The exact distribution of the next byte needs rows behind tokens that were not sampled
(``tests/reference/byte_model.py``). Per kind of text: the share of the mass of what follows a byte
that the rows of the text's own tokens miss, extra rows for each token, and nats by which the next
bytes differ from those with (almost) no context omitted. GGUF files need the package ``gguf``.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.language_model.models import save_teacher
from mopd_protocol import TokenTable
from tests.reference.byte_model import ByteModel, divergence, encoding_of_text

#: Kind -> a text.
TEXTS: Mapping[str, str] = {
    "prose": "The river rises in the mountains and flows south through the old town.",
    "code": "def add(first, second):\n    return first + second\n\n\nprint(add(12, 345))\n",
    "words": "cherry, plum, olive, mango, lemon, walnut, quince, apricot, juniper",
    "numbers": "1912, 2047, 33, 58121, 7, 904, 16384, 2.5, 1,000, 77",
}
#: The least share of contexts in place of zero: each of the others is a row.
_EXACT = 1e-6


@dataclass(frozen=True)
class Measured:
    """Figures of one text."""

    bytes: int
    tokens: int
    missing: float
    """Mean share of what follows a byte that is behind tokens other than the text's."""
    missing_95: float  # the 95th percentile
    extra_rows: float  # per token
    nats: float  # KL per byte, to the next bytes with almost no context omitted
    omitted: float  # mean of the bound


def measure(model: ByteModel, text: str) -> Measured:
    """Compare the rows of a text's own tokens, those with a least share, and almost all."""
    data = text.encode()
    ids = model.encode(data, data)[0]
    ends = np.cumsum([0, *(len(model.token_bytes[token]) for token in ids)]).tolist()
    own = {end: ids[:count] for count, end in enumerate(ends)}

    def of_text(begun: bytes, _: bytes) -> Sequence[Sequence[int]]:
        return [own[len(begun)]] if len(begun) in own else []

    sampled = replace(model, encode=of_text, least_share=0.0)
    exact = replace(model, least_share=_EXACT).next_bytes(data)
    some = model.next_bytes(data)
    missing = -np.expm1(sampled.next_bytes(data).logmasses - exact.logmasses)
    return Measured(
        bytes=len(data),
        tokens=len(ids),
        missing=float(missing.mean()),
        missing_95=float(np.quantile(missing, 0.95)),
        extra_rows=(some.rows - len(ids) - 1) / len(ids),
        nats=float(divergence(some, exact).mean()),
        omitted=float(some.omitted.mean()),
    )


def language_model(folder: Path, least_share: float) -> ByteModel:
    """Load a model as a distribution over texts behind its first control token, or its end."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    backend = tokenizer.backend_tokenizer
    table = TokenTable.from_tokenizer(backend)
    spelled = [b"" if i in table.marks else (b or b"") for i, b in enumerate(table.all_bytes)]
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    known: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def encode(text: str) -> Sequence[int]:
        return backend.encode(text, add_special_tokens=False).ids

    @torch.no_grad()
    def row(ids: tuple[int, ...]) -> NDArray[np.float64]:
        if ids not in known:
            logits = loaded(input_ids=torch.tensor([[begin, *ids]])).logits[0, -1, : len(spelled)]
            known[ids] = logits.double().log_softmax(dim=0).numpy()
        return known[ids]

    return ByteModel(
        spelled, [tokenizer.eos_token_id], encoding_of_text(encode, spelled), row, least_share
    )


def main() -> None:
    """Print and store a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model, or the folder of a GGUF file")
    parser.add_argument("--gguf-file", metavar="NAME", help="the model's GGUF file")
    parser.add_argument("--folder", type=Path, required=True, help="for a copy of the model")
    parser.add_argument("--least-share", type=float, default=1e-3, help="(default: 0.001)")
    parser.add_argument("--text", action="append", help="texts, in place of four kinds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = save_teacher(options.model, options.gguf_file, options.folder)
    model = language_model(folder, options.least_share)
    texts = {text[:20]: text for text in options.text or ()} or TEXTS
    figures = {kind: measure(model, text) for kind, text in texts.items()}
    table = Table(box=box.SIMPLE)
    table.add_column("text")
    for heading in ("bytes", "tokens", "missing", "95 %", "rows", "nats", "omitted"):
        table.add_column(heading, justify="right")
    for kind, each in figures.items():
        shares = f"{each.missing:.1%}", f"{each.missing_95:.1%}", f"{each.extra_rows:.2f}"
        counts = str(each.bytes), str(each.tokens)
        table.add_row(repr(kind)[1:-1], *counts, *shares, f"{each.nats:.5f}", f"{each.omitted:.4f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({k: asdict(v) for k, v in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
