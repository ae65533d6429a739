"""The wheel that users install, in an environment that holds nothing else of ours."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.packaging
@pytest.mark.timeout(900)
def test_the_light_parts_of_the_wheel_import_in_a_clean_environment(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)], check=True
    )
    (wheel,) = tmp_path.glob("mopd-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    script = "import sys, mopd_client.pool, mopd_protocol.codec; assert 'torch' not in sys.modules"
    subprocess.run([python, "-I", "-c", script], check=True, cwd=tmp_path)
    refused = subprocess.run(
        [tmp_path / "venv" / "bin" / "mopd", "check", "run.yaml"], capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "pip install 'mopd[trainer]'" in refused.stderr
