"""The recipes, and what their shell lines would start."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.deploy.compose_files import DEPLOY

ROOT = DEPLOY.parent
COOKBOOK = ROOT / "cookbook"
RECIPES = sorted(folder.parent.name for folder in COOKBOOK.glob("*/run.yaml"))

#: Stands in for ``mopd``: prints its working folder and its arguments.
_RECORDER = '#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n'


def shell_line(
    recipe: str, folder: Path, variables: Mapping[str, str], *overrides: str
) -> list[str]:
    """The arguments that ``run.sh`` gives to ``mopd`` under these environment variables."""
    recorder = folder / "mopd"
    recorder.write_text(_RECORDER)
    recorder.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    printed = subprocess.run(
        ["bash", str(COOKBOOK / recipe / "run.sh"), *overrides],
        env={"PATH": path, **variables},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert printed[0] == str(ROOT)  # recipes name their files from the repository's root
    return printed[1:]
