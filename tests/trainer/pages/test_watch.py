"""The server of a page: updates, errors, and rejected requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mopd_protocol.errors import ConfigError
from mopd_trainer.pages.server import PageServer
from mopd_trainer.pages.watch import watch_server
from mopd_trainer.run_folder.files import JOURNAL
from tests.trainer.pages.made_runs import append, journal, write_run
from tests.trainer.pages.test_report import Page, decoded


@contextmanager
def running(server: PageServer) -> Iterator[PageServer]:
    """Serve in a thread."""
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def request(
    server: PageServer, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Return status, body and headers of a response."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1])
    connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, dict(response.getheaders())


def test_page_and_updates_of_a_growing_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    with running(watch_server([folder], host="127.0.0.1", port=0)) as server:
        assert Page(request(server, "/")[1]).data["live"]
        append(folder / JOURNAL, journal(3))
        status, page, headers = request(server, "/")
        run = Page(page).data["runs"][0]
        assert status == HTTPStatus.OK
        assert len(decoded(run)) == 3
        assert headers["X-Content-Type-Options"] == "nosniff"
        journal_at, completions_at = (
            ":".join(map(str, run[f"{name}_position"])) for name in ("journal", "completions")
        )
        path = f"/updates?run=0&journal={journal_at}&completions={completions_at}"
        append(folder / JOURNAL, journal(1, first=4))
        update = json.loads(request(server, path)[1])
        assert json.loads(update["journal"]["text"])["step"] == 4
        assert update["age"] >= 0
        for wrong in ("/updates", "/updates?run=7&journal=0:0&completions=0:0", "/updates?run=x"):
            assert request(server, wrong)[0] == HTTPStatus.BAD_REQUEST
        assert request(server, "/etc/passwd")[0] == HTTPStatus.NOT_FOUND


def test_other_hosts_and_posts_of_other_pages_are_rejected() -> None:
    def double(parameters: Any) -> Any:
        return 2 * parameters["number"]

    page_server = PageServer(lambda: "<p>", {"double": double}, host="127.0.0.1", port=0)
    with running(page_server) as server:
        body = json.dumps({"number": 4})
        json_type = {"Content_Type": "application/json"}
        assert request(server, "/double", "POST", body, **json_type)[1] == "8"
        assert request(server, "/double", "POST", "[", **json_type)[0] == HTTPStatus.BAD_REQUEST
        assert request(server, "/double", "POST", "{}", **json_type)[0] == HTTPStatus.BAD_REQUEST
        text = {"Content_Type": "text/plain"}
        assert request(server, "/double", "POST", body, **text)[0] == HTTPStatus.FORBIDDEN
        for host in ("example.org", "example.org:80", "127.0.0.1.example.org"):
            assert request(server, "/", Host=host)[0] == HTTPStatus.FORBIDDEN
            rejected = request(server, "/double", "POST", body, **json_type, Host=host)
            assert rejected[0] == HTTPStatus.FORBIDDEN
        assert request(server, "/", Host="localhost:1")[0] == HTTPStatus.OK
        large = "x" * 1_000_001
        status = request(server, "/double", "POST", large, **json_type)[0]
        assert status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def test_address_in_use_and_missing_folder_are_errors(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    with watch_server([folder], host="127.0.0.1", port=0) as server:
        with pytest.raises(ConfigError) as caught:
            watch_server([folder], host="127.0.0.1", port=server.server_address[1])
        assert caught.value.key == "port"
    with pytest.raises(ConfigError) as caught:
        watch_server([tmp_path / "absent"], host="127.0.0.1", port=0)
    assert caught.value.key == str(tmp_path / "absent")
