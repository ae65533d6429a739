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
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL
from tests.trainer.pages.made_runs import append, completion, completions, journal, write_run
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


def test_a_page_has_summaries_and_each_completion_is_loaded_on_request(tmp_path: Path) -> None:
    lines = [
        *completions(3),
        completion([b"x" * 4_000, b"\xe2\x80\xa8"], nats=2.0),
        *completions(2),
    ]
    folder = write_run(tmp_path / "run", journal(2), lines[:4])
    with running(watch_server([folder], host="127.0.0.1", port=0)) as server:
        run = Page(request(server, "/")[1]).data["runs"][0]
        append(folder / COMPLETIONS, lines[4:])
        at = {
            name: ":".join(map(str, run[f"{name}_position"])) for name in ("journal", "completions")
        }
        path = f"/updates?run=0&journal={at['journal']}&completions={at['completions']}"
        summaries = (
            run["completions"] + json.loads(request(server, path)[1])["completions"]["lines"]
        )
        assert len(summaries) == len(lines)
        for summary, line in zip(summaries, lines, strict=True):
            assert not summary.keys() & {"tokens", "scores"}
            assert len(json.dumps(summary)) < 2_000
            (name,) = line["teachers"]
            compared = [each for each in line["nats"][name] if each is not None]
            assert summary["means"][name] == pytest.approx(sum(compared) / len(compared))
            assert summary["count"] == line["tokens"]["count"]
            status, body, _ = request(server, f"/completion?run=0&start={summary['start']}")
            assert (status, json.loads(body)) == (HTTPStatus.OK, line)
        for wrong in ("1", "-1", "99999999", "x"):
            status = request(server, f"/completion?run=0&start={wrong}")[0]
            assert status == HTTPStatus.BAD_REQUEST


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
        # Without a body, which the server does not read: it would close the connection meanwhile.
        size = {"Content_Length": "1000001"}
        status = request(server, "/double", "POST", None, **json_type, **size)[0]
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
