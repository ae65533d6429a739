"""Services run as subprocesses for the duration of the block."""

import sys
from pathlib import Path

import pytest

from mopd.demo import services
from mopd.demo.services import teacher_services
from mopd_protocol import TeacherError

pytestmark = pytest.mark.process

#: Prints its address at once, and is ready at the third probe.
SLOW = """
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        probes = Path(__file__).with_name("probes")
        if self.path == "/readyz":
            probes.write_text((probes.read_text() if probes.exists() else "") + "x")
        ready = self.path == "/healthz" or probes.read_text().count("x") == 3
        self.send_response(200 if ready else 503)
        self.end_headers()

http = HTTPServer(("127.0.0.1", 0), Handler)
print(f"  address    http://127.0.0.1:{http.server_port}  (documentation)", flush=True)
http.serve_forever()
"""
#: Fails its warm-up and keeps running.
UNHEALTHY = SLOW.replace('self.path == "/healthz" or', "False and")
#: Exits.
BROKEN = """
import sys
print("  address    http://127.0.0.1:1", flush=True)
sys.exit("mopd-teacher: no memory left")
"""


def replace_program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run this program instead of ``mopd-teacher``."""
    program = folder / "mopd-teacher"
    program.write_text(f"#!{sys.executable}\n{text}")
    program.chmod(0o755)
    monkeypatch.setattr(services, "_executable", lambda: program)


def test_services_are_ready_when_the_block_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_program(tmp_path, SLOW, monkeypatch)
    with teacher_services({"math": tmp_path}, tmp_path / "logs") as addresses:
        assert addresses["math"].startswith("http://127.0.0.1:")
        assert (tmp_path / "probes").read_text() == "x" * 3


@pytest.mark.parametrize("text", [BROKEN, UNHEALTHY], ids=["exits", "keeps-running"])
def test_a_failed_start_raises_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    replace_program(tmp_path, text, monkeypatch)
    error = pytest.raises(TeacherError, match=r"'math'.*(no memory left|HTTP/1\.1)")
    with error, teacher_services({"math": tmp_path}, tmp_path / "logs"):
        raise AssertionError("the service is not ready")
