"""Keys, quotas and TLS of a real process."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import trustme

from mopd_client import SyncTeacherClient
from tests.survival.running_teacher import PATIENCE_SECONDS, RunningTeacher, running_teacher

pytestmark = pytest.mark.process

SMALL = {"sequences": [{"prompt_token_ids": [1, 2], "completion_token_ids": [3]}], "top_k": 1}
KEYS = "alice: sesame-alice\nbob sesame-bob\nsesame-nameless\n# sesame-comment\n"


@dataclass
class Guarded:
    """A teacher that requires API keys and serves over TLS."""

    teacher: RunningTeacher
    client: httpx.Client
    keys: Path
    authority: Path
    used: set[str | None] = field(default_factory=set[str | None])  # keys of scoring requests

    def post(self, key: str | None, body: object = SMALL) -> httpx.Response:
        """Send a scoring request with this key."""
        self.used.add(key)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.client.post("/v1/logprobs", json=body, headers=headers)


@pytest.fixture(scope="module")
def guarded(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A quota of six tokens a minute: two small requests, then one every half minute."""
    folder = tmp_path_factory.mktemp("guarded")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    issued = authority.issue_cert("127.0.0.1")
    certificate, key, keys = folder / "certificate.pem", folder / "key.pem", folder / "keys"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    keys.write_text(KEYS)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    options = ["--tls-certificate", str(certificate), "--tls-key", str(key)]
    options += ["--api-key-file", str(keys), "--key-tokens-per-minute", "6"]
    with running_teacher(
        model_folder, folder / "log", *options, ready=False, scheme="https"
    ) as teacher:
        teacher.verify = context
        teacher.until("/readyz", 200)
        with httpx.Client(base_url=teacher.url, verify=context, timeout=PATIENCE_SECONDS) as client:
            guarded = Guarded(teacher, client, keys, folder / "authority.pem")
            yield guarded
    log = (folder / "log").read_text()
    assert "sesame" not in log
    assert ("key=alice" in log) == ("sesame-alice" in guarded.used)


def test_plain_http_and_an_unknown_authority_are_rejected(guarded: Guarded) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(guarded.teacher.url + "/healthz", timeout=PATIENCE_SECONDS)
    plain = guarded.teacher.url.replace("https", "http")
    with pytest.raises(httpx.TransportError):
        httpx.get(plain + "/healthz", timeout=PATIENCE_SECONDS)
    assert guarded.client.get("/healthz").status_code == 200


def test_client_trusts_the_authority_of_ca_file(guarded: Guarded) -> None:
    with SyncTeacherClient(
        guarded.teacher.url, api_key="sesame-nameless", ca_file=guarded.authority
    ) as client:
        assert client.handshake().service == "math"


@pytest.mark.parametrize("key", [None, "", "sesame", "alice", "alice: sesame-alice", "é" * 10_000])
def test_without_a_valid_key_no_response_has_details(guarded: Guarded, key: str | None) -> None:
    header = b"" if key is None else b"Bearer " + key.encode() if key else b"Bearer"
    headers = {b"Authorization": header} if header else {}
    responses = [
        guarded.client.get(path, headers=headers)
        for path in ("/v1/manifest", "/v1/tokenizer", "/v1/logprobs", "/v1/", "/v1/../v1/manifest")
    ]
    responses.append(guarded.client.post("/v1/logprobs", content=b"{", headers=headers))
    for response in responses:
        assert response.status_code == 401
    public = [
        guarded.client.get(path, headers=headers)
        for path in ("/", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/nowhere")
    ]
    for response in responses + public:
        text = response.text + str(response.headers)
        for secret in ("secret-qwen", "math", "sesame-", "Traceback", "/tmp", "uvicorn"):
            assert secret not in text, (response.url, secret)


def test_each_key_has_a_separate_quota_with_a_retry_after(guarded: Guarded) -> None:
    assert [guarded.post("sesame-alice").status_code for _ in range(2)] == [200, 200]
    refused = guarded.post("sesame-alice")
    assert refused.status_code == 429
    assert refused.json()["code"] == "quota_tokens"
    assert "'alice'" in refused.json()["detail"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert guarded.post("sesame-nameless").status_code == 200
    metrics = guarded.client.get("/metrics").text
    assert 'mopd_request_errors_total{reason="quota_tokens"} 1.0' in metrics
    for line in (
        'mopd_key_requests_total{key="alice",status="200"} 2.0',
        'mopd_key_requests_total{key="alice",status="429"} 1.0',
        'mopd_key_tokens_total{key="alice",kind="prompt"} 4.0',
        'mopd_key_tokens_total{key="alice",kind="completion"} 2.0',
        'mopd_key_queue_tokens{key="alice"} 0.0',
    ):
        assert line in metrics


def test_a_changed_key_file_revokes_old_keys_and_admits_new_ones(guarded: Guarded) -> None:
    assert guarded.post("sesame-bob").status_code == 200
    changed = guarded.keys.with_suffix(".new")
    changed.write_text(KEYS.replace("bob sesame-bob", "carol sesame-carol"))
    changed.replace(guarded.keys)
    assert guarded.post("sesame-bob").status_code == 401
    assert guarded.post("sesame-carol").status_code == 200
    guarded.keys.unlink()  # an editor replaces the file: the last keys remain valid
    assert guarded.post("sesame-carol").status_code == 200
    guarded.keys.write_text("")  # an empty file admits no key
    assert guarded.post("sesame-carol").status_code == 401
    assert guarded.post(None).status_code == 401
