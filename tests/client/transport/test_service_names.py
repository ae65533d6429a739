"""Addresses with a name: their URLs, resolution and certificates."""

import logging
import socket
import threading
from typing import Any

import httpx
import pytest
import trustme
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mopd_client.sync import SyncTeacherClient
from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.discovery import resolve
from mopd_client.transport.http_pools import HttpPools
from mopd_client.transport.outcome import certificate_problem
from mopd_protocol.errors import ConfigError
from tests.client.scripted_teacher import ScriptedTeacher, network
from tests.client.transport.test_discovery import NAME, Names

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "url", ["dns+http://", "dns+ftp://math", "dns+math:8101", "dns://math", "dns+http://math?a=1"]
)
async def test_an_invalid_name_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TeacherClient("math", [url])
    assert caught.value.key == "url"


@pytest.mark.parametrize(
    ("url", "ip", "replica", "host"),
    [
        (NAME, "fd00::1", "http://[fd00::1]:8101", "math:8101"),
        ("dns+https://math/x/", "10.0.0.1", "https://10.0.0.1/x", "math"),
        ("dns+http://math", "10.0.0.1", "http://10.0.0.1", "math"),
    ],
)
async def test_url_of_a_replica(url: str, ip: str, replica: str, host: str) -> None:
    names = Names(ip)
    client = TeacherClient("math", [url], transport=network(), resolve=names.resolve)
    async with client:
        await client._connection.replicas.renew()  # pyright: ignore[reportPrivateUsage]
        assert [(each.url, each.host) for each in client.replicas] == [(replica, host)]
    assert names.lookups == [("math", {"https": 443}.get(url[4:9], 8101 if ":8101" in url else 80))]


async def test_names_are_resolved_by_the_system() -> None:
    assert "127.0.0.1" in await resolve("localhost", 80)
    with pytest.raises(OSError, match=r"."):
        await resolve("no-such-name.invalid", 80)


async def test_a_certificate_is_that_of_the_name(tmp_path: Any) -> None:
    authority = trustme.CA()
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("math.teachers")
    chain.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse(request.headers["host"]))])
    with socket.create_server(("127.0.0.1", 0)) as bound:
        config = uvicorn.Config(
            app, log_config=None, lifespan="off", ssl_certfile=chain, ssl_keyfile=key
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        port = bound.getsockname()[1]
        for host in (f"math.teachers:{port}", "code.teachers", None):
            pools = HttpPools(1, headers={}, transport=None, ca_file=ca_file)
            sent = pools.send("GET", f"https://127.0.0.1:{port}/", host=host)
            if host and host.startswith("math"):
                assert (await sent).text == host
            else:
                with pytest.raises(httpx.ConnectError) as caught:
                    await sent
                assert certificate_problem(caught.value)
            await pools.aclose()
        server.should_exit = True
        thread.join()


def test_the_synchronous_client_resolves_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    names = Names("10.0.0.1")
    transport = httpx.MockTransport(ScriptedTeacher().respond)
    with SyncTeacherClient(NAME, transport=transport, resolve=names.resolve, verify=0) as client:
        score = client.score(prompt="?", completion_token_ids=[70])
    assert score.token_ids.tolist() == [70]
    assert "http://10.0.0.1:8101" in caplog.text
