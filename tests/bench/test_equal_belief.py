"""Two models that agree about a text have no loss, between published vocabularies."""

import random
import string
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bench.byte_models import false_loss, merging_pair
from bench.equal_belief import Result, main, measure, summary, texts
from bench.named_tokenizers import short_names
from tests.real_vocabularies import tokenizer_and_roles
from tests.reference.text_model import markov_texts

_SYMBOLS = string.ascii_letters + string.digits + "+/"
#: Texts that a normalizer changes, and the normalizer.
CHANGED = {
    "lower case": ("".join(random.Random(0).choices(_SYMBOLS, k=600)), normalizers.Lowercase()),
    "composed": (
        unicodedata.normalize("NFD", "Chúng tôi đã phát triển phương pháp học tập. " * 3),
        normalizers.NFC(),
    ),
    "superscripts": ("5³ cm³, and 3¼ cups; 10² m" * 5, normalizers.NFKC()),
}


@pytest.mark.parametrize("loss", ["prefix_kl", "ctkd"])
@pytest.mark.parametrize("text", ["prose", "code", "numbers", "json", "cjk", "scripts"])
@pytest.mark.parametrize(
    "pair", [("tekken", "v3"), ("v1", "python_50k"), ("python_50k", "v3"), ("tekken", "python_50k")]
)
def test_equal_beliefs_have_no_loss(pair: tuple[str, str], text: str, loss: str) -> None:
    result = measure(*pair, text, texts()[text], loss, confidence=0.999, threshold=0.1)
    assert result.nats_per_token <= 0.01
    assert result.pushed_down == 0.0
    # Without a comparison there is no loss either.
    assert result.compared > (0.99 if loss == "prefix_kl" else 0.4)


@pytest.mark.parametrize("loss", ["prefix_kl", "ctkd"])
@pytest.mark.parametrize("text", CHANGED)
@pytest.mark.parametrize(
    "pair", [("v1", "python_50k"), ("tekken", "python_50k"), ("python_50k", "tekken")]
)
def test_equal_beliefs_have_no_loss_if_a_normalizer_changes_the_text(
    pair: tuple[str, str], text: str, loss: str, tmp_path: Path
) -> None:
    student, teacher = pair
    written, normalizer = CHANGED[text]
    tokenizer = Tokenizer.from_str(tokenizer_and_roles(teacher)[0].to_str())
    tokenizer.normalizer = normalizer
    tokenizer.save(str(tmp_path / "teacher.json"))
    sides = student, str(tmp_path / "teacher.json")
    result = measure(*sides, text, written, loss, confidence=0.999, threshold=0.1)
    assert result.nats_per_token <= 0.01
    assert result.pushed_down == 0.0


@pytest.mark.parametrize("loss", ["prefix_kl", "ctkd"])
@pytest.mark.parametrize("text", ["cjk", "scripts"])
def test_equal_beliefs_have_no_loss_if_the_teacher_has_no_tokens_of_bytes(
    text: str, loss: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([*texts().values()], trainer)
    tokenizer.save(str(tmp_path / "teacher.json"))
    sides = "python_50k", str(tmp_path / "teacher.json")
    result = measure(*sides, text, texts()[text], loss, confidence=0.999, threshold=0.1)
    assert result.nats_per_token <= 0.01
    assert result.pushed_down == 0.0


def test_the_summary_names_the_largest_value() -> None:
    results = [
        Result("a.json", "b.json", "prose", "ctkd", 9, nats, pushed, 0.5, compared)
        for nats, pushed, compared in ((0.02, 0.0, 1.0), (0.03, 0.1, 0.9), (0.01, 0.0, 0.75))
    ]
    words = summary("ctkd", [*results, replace(results[1], student="c.json", nats_per_token=0.05)])
    assert {"ctkd:", "0.0500", "c,", "75%"} <= set(words.split())
    assert "3 of 4 texts" in words
    assert "2 with" in words


def test_a_loss_on_merged_vectors_has_a_loss_between_equal_beliefs() -> None:
    text = texts()["code"]
    result = measure("python_50k", "tekken", "code", text, "gold", confidence=0.999, threshold=0.1)
    assert result.nats_per_token > 0.05


@pytest.mark.parametrize(
    ("letters", "longest", "seed"), [("ab", 6, 1), ("ab", 6, 4), ("ab", 6, 11), ("abc", 5, 4)]
)
def test_one_byte_model_through_overlapping_merges_has_hardly_any_loss(
    letters: str, longest: int, seed: int
) -> None:
    texts_of_model = markov_texts(letters, longest, seed)
    assert false_loss(merging_pair(seed, letters, 6), texts_of_model, top_k=16) <= 0.05


@pytest.mark.parametrize(
    ("letters", "longest", "merges", "seed"), [("ab", 6, 10, 6), ("abc", 4, 12, 7)]
)
def test_a_token_that_was_not_produced_leaves_open_what_follows_it(
    letters: str, longest: int, merges: int, seed: int
) -> None:
    texts_of_model = markov_texts(letters, longest, seed)
    assert false_loss(merging_pair(seed, letters, merges), texts_of_model, top_k=64) <= 0.01


@pytest.mark.parametrize(
    ("letters", "longest", "merges", "seed"), [("ab", 6, 10, 4), ("abc", 4, 12, 1)]
)
def test_unlikely_text_that_the_student_divides_otherwise_has_hardly_any_loss(
    letters: str, longest: int, merges: int, seed: int
) -> None:
    texts_of_model = markov_texts(letters, longest, seed)
    assert false_loss(merging_pair(seed, letters, merges), texts_of_model, top_k=64) <= 0.013


def test_short_names_differ() -> None:
    paths = [f"/models/{name}/package/models/tokenizer.json" for name in ("llama", "qwen")]
    assert short_names([*paths, "tekken"]) == {
        paths[0]: "llama",
        paths[1]: "qwen",
        "tekken": "tekken",
    }
    assert short_names(["a/olmo.json", "b/x/tokenizer.json"]) == {
        "a/olmo.json": "olmo",
        "b/x/tokenizer.json": "x",
    }


@pytest.mark.parametrize(
    "options", [["--pairs", "tekken:no/such.json"], ["--losses", "prefix_kl,unknown"]]
)
def test_unknown_names_end_the_program_before_any_work(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["equal_belief", *options])
    monkeypatch.setattr("bench.equal_belief.measure", _raise)
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2


def _raise(*_: object, **__: object) -> Result:
    raise AssertionError("a loss was measured")
