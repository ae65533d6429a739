"""Command-line options that the comparisons of losses share."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mopd_trainer import ImportanceConfig, RolloutConfig


class NameList:
    """Parser of comma-separated names."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def __call__(self, text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in self._known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is unknown; expected some of {', '.join(self._known)}"
                )
        return names


def comparison_parser(
    program: str,
    description: str | None,
    losses: Sequence[str],
    pairs: Sequence[str],
    *,
    corrections: int | None = None,
) -> argparse.ArgumentParser:
    """Return a parser of what to compare, how long, and where files are.

    Args:
        program: a module of ``bench``; its models and runs are in ``runs/PROGRAM``.
        corrections: the default of ``--corrections``; None for that of ``mopd train``.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--plot", type=Path, help="file for the plot (default: next to the figures)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="students a loss (default: 3)")
    for name, known in (("losses", losses), ("pairs", pairs)):
        parser.add_argument(
            f"--{name}",
            type=NameList(known),
            default=tuple(known),
            metavar="A,B",
            help=f"of {', '.join(known)} (default: all)",
        )
    add_least_importance(parser)
    add_temperature(parser)
    parser.add_argument(
        "--teacher-temperature",
        type=float,
        metavar="T",
        help="of the teachers' distributions; below 1, targets are sharper (default: 1)",
    )
    add_corrections(parser, corrections)
    parser.add_argument("--steps", type=int, help="of every run (default: each pair's own)")
    parser.add_argument(
        "--model-steps", type=int, help="of training teachers and warm students, to try things"
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 steps of everything, to test the program"
    )
    parser.add_argument(
        "--evaluations", type=int, default=20, help="points of a curve (default: 20)"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="runs at once, one thread each (default: 2)"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs", program),
        metavar="DIR",
        help="models and finished runs, which are not done again (default: %(default)s)",
    )
    return parser


def add_least_importance(parser: argparse.ArgumentParser) -> None:
    """Add the option for importance weights."""
    parser.add_argument(
        "--least-importance",
        type=float,
        metavar="W",
        help="least importance weight of a sampled token; 1: no weights (default: "
        f"{ImportanceConfig().least_weight:g}, or 1 for policy_gradient)",
    )


def add_temperature(parser: argparse.ArgumentParser) -> None:
    """Add the option for the temperature of samples."""
    default = RolloutConfig.model_fields["temperature"].default
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"of the student's samples (default: {default:g}, or 1 for policy_gradient)",
    )


def add_corrections(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    """Add the option for corrected samples.

    Args:
        default: None for that of ``mopd train``.
    """
    ordinary = RolloutConfig.model_fields["corrections"].default
    described = f"{ordinary}, or 0 for policy_gradient" if default is None else default
    parser.add_argument(
        "--corrections",
        type=int,
        default=default,
        metavar="N",
        help=f"rounds for every sample by its teacher (default: {described})",
    )
