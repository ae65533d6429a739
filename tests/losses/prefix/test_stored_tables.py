"""The tables of prefix KL on disk: a second run loads them; a damaged file costs time only."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_losses.core.loss import AlignedPair
from mopd_losses.prefix import pair as pair_module
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.preparation import Preparation
from mopd_losses.prefix.targets import PrefixTargets
from mopd_protocol.tokenizers.joined_texts import TextTokens
from tests.losses.prefix_problems import prefix_problem


def problem() -> tuple[Any, list[AlignedPair]]:
    """Completions whose tokenizers are called for cuts, separate tokens and bounding tokens."""
    each = prefix_problem(38, completions=2)
    return each.pair, each.comparisons


class Encoder:
    """A tokenizer that counts its texts."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.merges = inner, inner.merges
        self.texts = 0

    def encode_arrays(self, texts: list[str]) -> TextTokens:
        self.texts += len(texts)
        return self.inner.encode_arrays(texts)


def prepared(pair: Any, comparisons: list[AlignedPair], folder: Path) -> tuple[PrefixTargets, int]:
    """Targets of a new preparation, and how many texts were tokenized for them."""
    encoders: list[Any] = [Encoder(side.encoder) for side in (pair.student, pair.teacher)]
    tables = pair.student.table, pair.teacher.table
    preparation = Preparation(TokenizerPair(tables[0], encoders[0], tables[1], encoders[1], folder))
    targets = preparation.targets(comparisons, [0, 50], mass_floor=0.1)
    return targets, sum(encoder.texts for encoder in encoders)


def assert_equal(first: Any, second: Any) -> None:
    for field in fields(first):
        left, right = getattr(first, field.name), getattr(second, field.name)
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
        else:
            assert_equal(left, right)


def test_a_second_run_tokenizes_less_and_has_the_same_targets(tmp_path: Path) -> None:
    pair, comparisons = problem()
    targets, texts = prepared(pair, comparisons, tmp_path)
    again, fewer = prepared(pair, comparisons, tmp_path)
    assert_equal(targets, again)
    assert texts > 0
    assert fewer < texts / 2
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("damage", ["empty", "half", "other", "version"])
def test_a_file_that_cannot_be_used_is_computed_and_written_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, comparisons = problem()
    targets, texts = prepared(pair, comparisons, tmp_path)
    (path,) = tmp_path.iterdir()
    stored = path.read_bytes()
    if damage == "version":
        monkeypatch.setattr(pair_module, "FORMAT_VERSION", 0)
    else:
        path.write_bytes({"empty": b"", "half": stored[: len(stored) // 2]}.get(damage, b"{}" * 9))
    again, as_many = prepared(pair, comparisons, tmp_path)
    assert_equal(targets, again)
    assert as_many == texts
    _, fewer = prepared(pair, comparisons, tmp_path)
    assert fewer < texts / 2


def test_a_folder_that_takes_no_files_costs_only_the_next_run(tmp_path: Path) -> None:
    pair, comparisons = problem()
    file = tmp_path / "file"
    file.write_text("not a folder")
    targets, _ = prepared(pair, comparisons, file)
    assert_equal(targets, prepared(pair, comparisons, tmp_path)[0])
