"""Compare losses between tokenizers that split numbers differently.

    python -m bench.numerals --json OUT
    python -m bench.numerals --pairs digits_to_numerals --losses prefix_kl,gold,sft --seeds 1

A teacher is trained to add (or to reverse lists of words), a student only on the output format.
Each loss distils the teacher on the student's samples, without reference answers, with the same
steps, prompts and learning rate. Cross entropy on reference answers (``sft``) measures how much the
student can learn in that budget.
"""

from collections.abc import Sequence

from rich.console import Console

from bench.numerals.comparison import chosen_pairs, compare
from bench.numerals.options import comparison_parser
from bench.numerals.pairs import LOSSES, PAIRS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing comparisons, print tables and save figures."""
    parser = comparison_parser("numerals", __doc__, LOSSES, tuple(PAIRS), corrections=0)
    options = parser.parse_args(arguments)
    compare(options, chosen_pairs(options, PAIRS), Console())


if __name__ == "__main__":
    main()
