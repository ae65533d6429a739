"""Model folders, files and a running teacher, for the commands that compare tokenizers."""

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from mopd_client.sync import SyncTeacherClient
from tests import tiny_models
from tests.server.tiny_teachers import teacher_of_family
from tests.trainer.students import FAMILIES, model_of, tokenizer

URL = "http://teacher:8101"
_FOLDER = TemporaryDirectory(prefix="mopd-tests-")  # goes when the tests end


@cache
def model_folder(family: str) -> Path:
    """One of the tiny models, as it would be downloaded."""
    return tiny_models.save(
        model_of(family), tokenizer(FAMILIES[family][1]), Path(_FOLDER.name) / family
    )


def tokenizer_file(family: str, folder: Path) -> Path:
    """Copy the family's ``tokenizer.json`` without its other files."""
    path = folder / f"{family}.json"
    path.write_bytes((model_folder(family) / "tokenizer.json").read_bytes())
    return path


def serve(family: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a real teacher service, reached without a network."""
    transport = httpx.ASGITransport(teacher_of_family(family).app)
    client = partial(SyncTeacherClient, transport=transport)
    monkeypatch.setattr("mopd_trainer.inspection.tokenizers.SyncTeacherClient", client)
    return URL
