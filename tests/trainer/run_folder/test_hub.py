"""Upload of the trained student to a hub: a local server with the routes that the library calls."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from mopd_protocol.errors import ConfigError, MopdError
from mopd_trainer.config.student import HubConfig
from mopd_trainer.run_folder.hub import push_to_hub, require_hub


class FakeHub(ThreadingHTTPServer):
    """Keeps the committed files of each (repository, branch)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, bool] = {}  # name -> private
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.tokens: set[str | None] = set()
        self.rejects_commits = False


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._reply({"sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.tokens.add(self.headers["authorization"])
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:3] == ["api", "repos", "create"]:
            values = json.loads(body)
            name = "/".join(filter(None, (values.get("organization"), values["name"])))
            self.server.repositories[name] = values.get(
                "private", values.get("visibility") == "private"
            )
            self._reply({"url": f"https://huggingface.co/{name}", "name": name})
        elif parts[4:5] == ["branch"]:
            self.server.files.setdefault(("/".join(parts[2:4]), parts[5]), {})
            self._reply({})
        elif parts[4:5] == ["preupload"]:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            self._reply({"files": modes})
        elif parts[4:5] == ["commit"] and not self.server.rejects_commits:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.server.files.setdefault(("/".join(parts[2:4]), parts[5]), {}).update(files)
            url = f"https://huggingface.co/{'/'.join(parts[2:4])}/commit/{'0' * 40}"
            self._reply({"commitOid": "0" * 40, "commitUrl": url, "hookOutput": ""})
        else:
            self._reply({"error": "no space left in this repository"}, status=403)

    def _reply(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub, as ``HF_ENDPOINT`` and ``HF_TOKEN`` name one."""
    with FakeHub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder."""
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    (tmp_path / "final" / "model.safetensors").write_bytes(bytes(range(256)))
    return tmp_path / "final"


@pytest.mark.parametrize("revision", [None, "step-100"])
def test_all_files_are_uploaded_to_the_revision(
    hub: FakeHub, folder: Path, revision: str | None
) -> None:
    private = revision is None
    config = HubConfig(repo_id="lab/student", private=private, revision=revision)
    require_hub(config)
    push_to_hub(folder, config)
    assert hub.repositories == {"lab/student": private}
    assert hub.files["lab/student", revision or "main"] == {
        "config.json": b"{}",
        "model.safetensors": bytes(range(256)),
    }
    assert hub.tokens == {"Bearer hf_secret"}


def test_a_failed_upload_names_the_folder_and_loses_nothing(hub: FakeHub, folder: Path) -> None:
    hub.rejects_commits = True
    with pytest.raises(MopdError) as caught:
        push_to_hub(folder, HubConfig(repo_id="lab/student", revision="step-100"))
    assert caught.value.key == "student.push_to_hub"
    assert f"hf upload lab/student {folder} --revision step-100" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len([*folder.iterdir()]) == 2


def test_a_missing_token_is_found_before_training(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    require_hub(None)
    with pytest.raises(ConfigError) as caught:
        require_hub(HubConfig(repo_id="lab/student"))
    assert caught.value.key == "student.push_to_hub"
    assert not hub.tokens


def test_offline_mode_is_found_before_training(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError):
        require_hub(HubConfig(repo_id="lab/student"))
