"""Claims about on-policy distillation, each measured by one command, on a CPU in minutes.

    python -m bench.results --all --seeds 3 --page docs/pages/results.md
    python -m bench.results --only E6

E1  distillation against SFT and REINFORCE, for growing completions
E3  size of the top-k and treatment of the rest; one sampled token
E4  averages over teachers with short and long completions
E5  forgetting and recovery with the earlier self as the teacher
E6  control arms: teachers with nothing to teach
E7  certain and uncertain teachers of a small student; the variance of the policy gradient

``python -m bench.language_model`` measures a real language model (E9).
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.results import averages, controls, recovery, reinforcement, truncation, uncertainty
from bench.results.claim import Claim, span
from bench.results.page import write_page

CLAIMS: Mapping[str, Callable[[int], list[Claim]]] = {
    "E1": reinforcement.measure,
    "E3": truncation.measure,
    "E4": averages.measure,
    "E5": recovery.measure,
    "E6": controls.measure,
    "E7": uncertainty.measure,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the claims, print their tables, and write the page."""
    parser = argparse.ArgumentParser(
        "bench.results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--all", action="store_true")
    chosen.add_argument("--load", type=Path, nargs="+", help="files of --json, to write a page")
    chosen.add_argument("--only", help=f"of {', '.join(CLAIMS)}, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="save all numbers")
    parser.add_argument("--page", type=Path, help="Markdown page with a generated part")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    claims = [
        Claim(**values) for path in options.load or () for values in json.loads(path.read_text())
    ]
    names = CLAIMS if options.all else (options.only or "").split(",")
    for name in () if options.load else names:
        measured = CLAIMS[name](options.seeds)
        claims += measured
        for claim in measured:
            _show(console, claim)
        if options.json:
            options.json.write_text(json.dumps([each.json() for each in claims], indent=1) + "\n")
    if options.page:
        write_page(claims, options.page)


def _show(console: Console, claim: Claim) -> None:
    table = Table(claim.name, *claim.columns, box=None)
    for arm, columns in claim.rows.items():
        table.add_row(arm, *map(span, columns))
    console.print(table)
    verdict = "reproduced" if claim.reproduced else "NOT reproduced"
    console.print(f"{claim.claim}: {verdict} ({claim.seconds:.0f} s)")


if __name__ == "__main__":
    main()
