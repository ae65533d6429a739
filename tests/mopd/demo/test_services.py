"""Services as separate processes: there for the block, all of it."""

import sys
from pathlib import Path

import pytest

from mopd.demo import services
from mopd.demo.services import teacher_services
from mopd_protocol.errors import TeacherError

#: A teacher that tells its address at once, and is asked three times before it is ready.
SLOW = """
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = Path(__file__).with_name("asked")
        if self.path == "/readyz":
            asked.write_text((asked.read_text() if asked.exists() else "") + "once more, ")
        ready = self.path == "/healthz" or asked.read_text().count("once more") == 3
        self.send_response(200 if ready else 503)
        self.end_headers()

http = HTTPServer(("127.0.0.1", 0), Handler)
print(f"  address    http://127.0.0.1:{http.server_port}  (documentation)", flush=True)
http.serve_forever()
"""
#: One whose warm-up fails, and that stays.
UNHEALTHY = SLOW.replace('self.path == "/healthz" or', "False and")
#: One that ends.
BROKEN = """
import sys
print("  address    http://127.0.0.1:1", flush=True)
sys.exit("mopd-teacher: no memory left")
"""


def stand_in(folder: Path, text: str, patched: pytest.MonkeyPatch) -> None:
    """Has this program be ``mopd-teacher``."""
    program = folder / "mopd-teacher"
    program.write_text(f"#!{sys.executable}\n{text}")
    program.chmod(0o755)
    patched.setattr(services, "_executable", lambda: program)


def test_services_are_ready_when_the_block_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, SLOW, monkeypatch)
    with teacher_services({"math": tmp_path}, tmp_path / "logs") as found:
        assert found["math"].startswith("http://127.0.0.1:")
        assert (tmp_path / "asked").read_text() == "once more, " * 3


@pytest.mark.parametrize("text", [BROKEN, UNHEALTHY], ids=["ends", "stays"])
def test_a_service_that_will_not_be_ready_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    stand_in(tmp_path, text, monkeypatch)
    told = pytest.raises(TeacherError, match=r"'math' did not start: .*(no memory left|HTTP/1\.1)")
    with told, teacher_services({"math": tmp_path}, tmp_path / "logs"):
        raise AssertionError("nobody is there")
