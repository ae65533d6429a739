"""The alignment explorer: chunks, projection rows and equal beliefs of several tokenizers."""

import json
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pytest

from mopd_losses.config import ProjectionSettings
from mopd_protocol.errors import DataError
from mopd_trainer import align
from mopd_trainer.cli.main import main
from mopd_trainer.inspection.explorer import BELIEF_TOKENS, MAX_BYTES, Explorer
from mopd_trainer.inspection.projection import project
from mopd_trainer.inspection.tokenizers import load_tokenizer
from mopd_trainer.pages.alignment_page import alignment_server
from tests.trainer.pages.test_report import Page
from tests.trainer.pages.test_watch import request, running
from tests.trainer.vocabularies import model_folder

FAMILIES = ("qwen", "llama", "qwen")
TEXT = "Grüße 12345 + 7 =\n的 漢字"


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return Explorer([load_tokenizer(str(model_folder(family))) for family in FAMILIES])


def test_chunks_and_projection_rows_are_those_of_training(explorer: Explorer) -> None:
    aligned = explorer.align(TEXT)
    expected = align(str(model_folder("qwen")), str(model_folder("llama")), TEXT)
    ids = [sequence.token_ids.tolist() for sequence in expected.sequences]
    assert [tokens["ids"] for tokens in aligned["tokens"]] == [*ids, ids[0]]
    sizes: list[tuple[int, ...]] = []
    for part in aligned["pairs"][0]["chunks"]:
        sizes += [tuple(part[:2])] if isinstance(part, list) else [(1, 1)] * part
    assert sizes == [chunk.sizes for chunk in expected.chunks]
    assert aligned["pairs"][1]["chunks"] == [len(ids[0])]
    matrix = project(*explorer.tokenizers[:2], ProjectionSettings())
    columns = np.repeat(np.arange(matrix.teacher_size), np.diff(matrix.column_starts))
    projection = aligned["pairs"][0]["projection"]
    assert projection["rows"].keys() == {str(token) for token in ids[0]}
    for token, row in projection["rows"].items():
        entries = matrix.student_ids == int(token)
        assert [target for target, _ in row] == columns[entries].tolist()
        assert [weight for _, weight in row] == pytest.approx(matrix.weights[entries].tolist())
        assert {str(target) for target, _ in row} <= projection["spellings"].keys()


def test_equal_beliefs(explorer: Explorer) -> None:
    beliefs = {each["loss"]: each for each in explorer.beliefs("7 + 5 = 12. " * 60, 1)}
    assert beliefs["prefix_kl"]["tokens"] <= BELIEF_TOKENS
    assert beliefs["prefix_kl"]["nats_per_token"] == pytest.approx(0, abs=0.01)
    assert not any(beliefs["prefix_kl"]["pushed_down"])
    assert beliefs["ctkd"]["compared"] <= beliefs["ctkd"]["tokens"] == len(beliefs["ctkd"]["nats"])


@pytest.mark.parametrize("text", ["a" * (MAX_BYTES + 1), "half \ud800"])
def test_invalid_text_is_an_error(explorer: Explorer, text: str) -> None:
    with pytest.raises(DataError) as caught:
        explorer.align(text)
    assert caught.value.key == "text"


def test_server_aligns_and_checks_texts(explorer: Explorer) -> None:
    json_type = {"Content_Type": "application/json"}
    with running(alignment_server(explorer, TEXT, host="127.0.0.1", port=0)) as server:
        assert Page(request(server, "/")[1]).data["aligned"] == explorer.align(TEXT)
        body = json.dumps({"text": "1 + 1", "teacher": 1})
        aligned = request(server, "/align", "POST", body, **json_type)
        assert json.loads(aligned[1]) == explorer.align("1 + 1")
        checked = json.loads(request(server, "/beliefs", "POST", body, **json_type)[1])
        assert [each["loss"] for each in checked][:2] == ["prefix_kl", "ctkd"]
        for wrong in ({"text": 1}, {}, {"text": "a", "teacher": 3}, {"text": "a", "teacher": 0}):
            status = request(server, "/beliefs", "POST", json.dumps(wrong), **json_type)[0]
            assert status == HTTPStatus.BAD_REQUEST


def test_page_of_one_text_has_every_check(tmp_path: Path) -> None:
    names = [str(model_folder(family)) for family in FAMILIES]
    main(["align", *names, "--text", "1 + 2", "--output", str(tmp_path / "page.html")])
    data = Page((tmp_path / "page.html").read_text()).data
    assert not data["live"]
    assert data["beliefs"].keys() == {"1", "2"}
    with pytest.raises(SystemExit) as caught:
        main(["align", *names, "--text", "1 + 2"])
    assert caught.value.code == 2
