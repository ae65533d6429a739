"""``mopd`` and ``python -m mopd``: the trainer's commands and the demo."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mopd_trainer.cli import main as cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command of ``mopd``."""
    cli.main(arguments, extend=_add_demo)


def _add_demo(add_command: cli.AddCommand) -> None:
    demo = add_command(
        "demo",
        help="two teachers, two services, one student, on this machine",
        description="Train two tiny teachers with different tokenizers (cached), serve both over "
        "HTTP, and distil a student with a third tokenizer from them.",
    )
    demo.add_argument(
        "--output-dir", type=Path, default=Path("runs/demo"), help="default: runs/demo"
    )
    demo.add_argument("--seed", type=int, default=0, help="default: 0")
    demo.add_argument("--steps", type=int, default=None, help="distillation steps")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    from mopd_trainer.api import require_trainer_extra

    require_trainer_extra()
    from mopd.demo.run import run_demo
    from mopd_trainer.reporting.console import make_console

    run_demo(options.output_dir, seed=options.seed, steps=options.steps, console=make_console())


if __name__ == "__main__":  # torchrun --nproc-per-node N -m mopd train RUN.YAML
    main()
