"""Tests of the certificate of a listening socket."""

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from fastapi import FastAPI

from mopd_protocol.errors import ConfigError
from mopd_server.process.certificate import ServerCertificate, expiry_of
from mopd_server.process.http_server import HttpServer
from mopd_server.process.listening import bound_socket
from mopd_server.settings import ListenSettings

AUTHORITY = trustme.CA()


def issue(folder: Path, expiry: datetime | None = None) -> tuple[Path, Path]:
    """Replace the certificate and the key in ``folder``."""
    issued = AUTHORITY.issue_cert("127.0.0.1", not_after=expiry)
    files = folder / "certificate.pem", folder / "key.pem"
    for file, pem in zip(files, (issued.cert_chain_pems[0], issued.private_key_pem), strict=True):
        changed = file.with_suffix(".new")
        pem.write_to_path(changed)
        changed.replace(file)
    return files


def served_certificate(port: int, name: str | None) -> bytes:
    """Return the certificate of a new connection, with or without a server name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    AUTHORITY.configure_trust(context)
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


@pytest.mark.parametrize("year", [2049, 2050])  # UTCTime, GeneralizedTime
def test_expiry_is_that_of_the_first_certificate(year: int, tmp_path: Path) -> None:
    expiry = datetime(year, 7, 3, 12, 34, 56, tzinfo=UTC)
    certificate, _ = issue(tmp_path, expiry)
    assert expiry_of("# comment\n" + certificate.read_text()) == expiry


def test_expired_certificate_is_rejected_with_its_date(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2001-02-03") as caught:
        ServerCertificate(*issue(tmp_path, datetime(2001, 2, 3, tzinfo=UTC)))
    assert caught.value.key == "tls_certificate"


def test_certificate_near_its_expiry_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ServerCertificate(*issue(tmp_path, datetime.now(UTC) + timedelta(days=13)))
    (record,) = caplog.records
    assert record.levelname == "WARNING"


@pytest.mark.parametrize("name", [None, "teacher.example"])
def test_new_connections_use_a_replaced_certificate(name: str | None, tmp_path: Path) -> None:
    listen = ListenSettings(port=0, **dict(zip(FILES, issue(tmp_path), strict=True)))
    server = HttpServer(FastAPI(), listen, on_stopped=lambda: None)
    with bound_socket(listen.host, 0) as bound:
        port = bound.getsockname()[1]
        server.start(bound)
        try:
            first = served_certificate(port, name)
            certificate, key = issue(tmp_path)
            second = served_certificate(port, name)
            assert second == ssl.PEM_cert_to_DER_cert(certificate.read_text()) != first
            key.write_text("half of the")
            assert served_certificate(port, name) == second
        finally:
            server.stop()


FILES = ("tls_certificate", "tls_key")
