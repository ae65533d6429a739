"""``ServerCertificate``: the TLS certificate of the service, reloaded when its file changes."""

import logging
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mopd_protocol.errors import ConfigError

logger = logging.getLogger(__name__)

#: Time before its expiry from which a certificate is a warning in the log.
_SOON = timedelta(days=14)


class ServerCertificate:
    """Certificate chain and private key; ``context`` is that of a listening socket.

    Every new connection uses the files of that moment. If those are invalid (only one of the two
    is replaced so far), the previous certificate stays in use.

    Raises:
        ConfigError: if the files are invalid, or the certificate has expired.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._versions = self._read_versions()
        self._current = self._load()
        self.context = self._current
        self.context.sni_callback = self._on_connection

    def _on_connection(
        self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> None:
        """Use the current certificate; called with and without a name."""
        self._refresh()
        connection.context = self._current

    def _refresh(self) -> None:
        if (versions := self._read_versions()) == self._versions:
            return
        self._versions = versions
        try:
            self._current = self._load()
        except ConfigError as error:
            logger.error("%s; keeping the previous certificate", error)
            return
        logger.info("reloaded the TLS certificate")

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
            expiry = expiry_of(certificate.read_text())
        except (OSError, ValueError, IndexError) as error:  # ssl.SSLError is an OSError
            reason = error.reason if isinstance(error, ssl.SSLError) else None
            raise ConfigError(
                f"TLS files {certificate} and {key}: invalid: {reason or error} (expected a "
                "certificate and its private key, both PEM)",
                key="tls_certificate",
            ) from error
        left = expiry - datetime.now(UTC)
        if left <= timedelta(0):
            raise ConfigError(
                f"TLS certificate {certificate}: expired (found {expiry:%Y-%m-%d %H:%M} UTC, "
                "expected a later date). Renew it.",
                key="tls_certificate",
            )
        if left < _SOON:
            logger.warning("%s expires on %s UTC", certificate, f"{expiry:%Y-%m-%d %H:%M}")
        return context

    def _read_versions(self) -> Sequence[tuple[int, int] | None]:
        versions: list[tuple[int, int] | None] = []
        for file in self._files:
            try:
                status = file.stat()
            except OSError:
                versions.append(None)
            else:
                versions.append((status.st_mtime_ns, status.st_ino))
        return versions


def expiry_of(pem: str) -> datetime:
    """Return ``notAfter`` of the first certificate of a PEM file (RFC 5280, section 4.1).

    Raises:
        ValueError: if the file has no certificate.
    """
    start = pem.find(ssl.PEM_HEADER)
    der = ssl.PEM_cert_to_DER_cert(pem[start : pem.index(ssl.PEM_FOOTER, start)] + ssl.PEM_FOOTER)
    (_, certificate), _ = _element(der)
    (_, fields), _ = _element(certificate)
    if fields[0] == _VERSION_TAG:  # version 1 has none
        _, fields = _element(fields)
    for _ in range(3):  # serial number, algorithm, issuer
        _, fields = _element(fields)
    (_, validity), _ = _element(fields)
    _, after = _element(validity)
    (tag, text), _ = _element(after)
    pattern = "%y%m%d%H%M%SZ" if tag == _UTC_TIME_TAG else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), pattern).replace(tzinfo=UTC)


_VERSION_TAG = 0xA0
_UTC_TIME_TAG = 0x17


def _element(der: bytes) -> tuple[tuple[int, bytes], bytes]:
    """Return tag and content of the first DER element, and the rest."""
    tag, length, start = der[0], der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start])
    return (tag, der[start : start + length]), der[start + length :]
