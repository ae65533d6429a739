"""Translated scores against the truth of one byte model through two tokenizers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.byte_models import merging_pair, merging_tokenizer
from mopd.demo.demo_tokenizers import student_tokenizer, words_teacher_tokenizer
from mopd.demo.examples import Encoder
from mopd_losses.translation.translation import ExtraRow, Translation
from mopd_losses.translation.translator import Translator
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TextEncoder
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.prefix_pairs import Pair, random_pair
from tests.losses.translation.truth import TruePending, TrueTranslator
from tests.reference.text_model import markov_texts
from tests.reference.translation import SharedTexts, Translates

EXACT = 1e-4

#: Random pairs are drawn from this many, which are made once.
PAIRS = 16
LETTERS, LONGEST = "ab", 5

seeds = st.integers(0, PAIRS - 1)
kinds = st.sampled_from(("merging", "prefix_closed"))


@cache
def pair_of(kind: str, seed: int) -> Pair:
    if kind == "merging":
        return merging_pair(seed, LETTERS, 6)
    return random_pair(seed, LETTERS)


@cache
def translator_of(pair: Pair) -> Translator:
    student, teacher = pair.student, pair.teacher
    return Translator(student.table, student.encoder, teacher.table, teacher.encoder)


@cache
def texts_of(seed: int) -> dict[str, float]:
    return markov_texts(LETTERS, LONGEST, seed)


@dataclass(frozen=True, eq=False)
class Problem:
    """Completions of one byte model, whole or without their last tokens."""

    shared: SharedTexts
    completions: list[TokenSequence]

    def translated(self, translator: Translates | None = None) -> list[Translation]:
        translator = translator or translator_of(self.shared.pair)
        return self.shared.translated(translator, self.completions)[0]


@st.composite
def problems(draw: st.DrawFn, top_k: int | None = None, truncated: bool = True) -> Problem:
    pair, texts = pair_of(draw(kinds), draw(seeds)), texts_of(draw(seeds))
    shared = SharedTexts(pair, texts, top_k)
    chosen = draw(st.lists(st.sampled_from([*texts]), min_size=1, max_size=6))
    lengths = st.sampled_from((None, -1, 1) if truncated else (None,))
    completions = [shared.completion(text, draw(lengths)) for text in chosen]
    return Problem(shared, [each for each in completions if len(each)] or [shared.completion("a")])


def check_form(problem: Problem, translations: Sequence[Translation]) -> None:
    """Rows are sorted, without an id twice, and have a mass of one with the tail."""
    for completion, translation in zip(problem.completions, translations, strict=True):
        topk = translation.topk
        assert len(topk) == len(completion)
        for ids, logprobs, tail in zip(topk.ids, topk.logprobs, topk.tail_logprobs, strict=True):
            present = ids >= 0
            assert present[: present.sum()].all(), "entries behind missing ones"
            assert len({*ids[present].tolist()}) == present.sum()
            assert (np.diff(logprobs[present]) <= 0).all()
            total = np.exp(logprobs.astype(np.float64)).sum() + math.exp(tail)
            assert total == pytest.approx(1, abs=EXACT)


def check_entries(problem: Problem, translations: Sequence[Translation]) -> None:
    """Each entry is the truth."""
    for completion, translation in zip(problem.completions, translations, strict=True):
        topk, truth = translation.topk, problem.shared.truth(completion).exp().numpy()
        for row, ids in enumerate(topk.ids):
            present = ids >= 0
            probabilities = np.exp(topk.logprobs[row, present])
            np.testing.assert_allclose(probabilities, truth[row, ids[present]], atol=EXACT)


def check_realised(problem: Problem, translations: Sequence[Translation]) -> None:
    """The realised token's probability is the truth if it has a name, else at least that: its
    text may continue so that the student would write another token."""
    pairs = zip(problem.completions, translations, strict=True)
    for completion, translation in pairs:
        rows = np.arange(len(completion))
        truth = problem.shared.truth(completion).exp().numpy()[rows, completion.token_ids]
        known = translation.coverage.has_signal
        realised = np.exp(translation.topk.token_logprobs)
        named = (translation.topk.ids == completion.token_ids[:, None]).any(axis=1)
        np.testing.assert_allclose(realised[named], truth[named], rtol=0.01, atol=EXACT / 10)
        assert (realised[known] >= 0.99 * truth[known] - EXACT / 10).all()


def check_coverage(problem: Problem, translations: Sequence[Translation]) -> None:
    """Coverage has the figures of the rows, and reports each likely text that has no name."""
    pairs = zip(problem.completions, translations, strict=True)
    for completion, translation in pairs:
        topk, coverage = translation.topk, translation.coverage
        truth = problem.shared.truth(completion).exp().numpy()
        named = np.exp(topk.logprobs.astype(np.float64))
        np.testing.assert_allclose(coverage.named_mass, named.sum(axis=1), atol=EXACT)
        silent = ~coverage.has_signal
        assert (topk.ids[silent] < 0).all()
        np.testing.assert_allclose(topk.tail_logprobs[silent], 0, atol=EXACT)
        for row, likeliest in enumerate(truth.argmax(axis=1)):
            # The realised token needs no entry: its probability is known.
            nameless = likeliest not in topk.ids[row] and likeliest != completion.token_ids[row]
            if nameless and truth[row, likeliest] > 0.5:
                assert coverage.lost_top1[row], (row, likeliest)
            if named[row].max(initial=0) > math.exp(topk.tail_logprobs[row]) + EXACT:
                assert not coverage.lost_top1[row], row


CHECKS = check_form, check_entries, check_realised, check_coverage


@settings(max_examples=60)
@given(problems(truncated=False))
def test_complete_rows_give_the_truth_or_nothing(problem: Problem) -> None:
    translations = problem.translated()
    for check in CHECKS:
        check(problem, translations)


@settings(max_examples=30)
@given(problems())
def test_truncated_completions_have_the_truth_or_nothing(problem: Problem) -> None:
    translations = problem.translated()
    for check in CHECKS:
        check(problem, translations)


@settings(max_examples=30)
@given(st.sampled_from((1, 2, 3)).flatmap(problems))
def test_translations_of_cut_rows_are_well_formed(problem: Problem) -> None:
    check_form(problem, problem.translated())


@settings(max_examples=30)
@given(seeds, seeds, st.sampled_from((None, 2)), st.data())
def test_with_one_tokenizer_the_translation_is_the_score(
    seed: int, texts_seed: int, top_k: int | None, data: st.DataObject
) -> None:
    student = pair_of("merging", seed).student
    shared = SharedTexts(Pair(student, student), texts_of(texts_seed), top_k)
    completion = shared.completion(data.draw(st.sampled_from([*shared.texts])))
    [translation], known = shared.translated(translator_of(shared.pair), [completion])
    topk, expected = translation.topk, shared.score(completion).topk
    assert not known
    for row, token in enumerate(completion.token_ids.tolist()):
        entries, scored = (
            {i: math.exp(p) for i, p in zip(*columns, strict=True) if i >= 0}
            for each in (topk, expected)
            for columns in [(each.ids[row].tolist(), each.logprobs[row].tolist())]
        )
        scored[token] = math.exp(expected.token_logprobs[row])
        for entry, probability in entries.items():
            assert probability == pytest.approx(scored.get(entry, 0.0), abs=EXACT)
    np.testing.assert_allclose(topk.token_logprobs, expected.token_logprobs, atol=0.01)
    check_form(Problem(shared, [completion]), [translation])
    assert translation.coverage.has_signal.all()


@settings(max_examples=30)
@given(problems())
def test_completions_of_a_batch_are_independent(problem: Problem) -> None:
    together = problem.translated()
    for completion, translation in zip(problem.completions, together, strict=True):
        [single] = Problem(problem.shared, [completion]).translated()
        columns = min(single.topk.k, translation.topk.k)
        for first, second in ((single, translation), (translation, single)):
            assert (first.topk.ids[:, columns:] < 0).all()
            np.testing.assert_array_equal(first.topk.ids[:, :columns], second.topk.ids[:, :columns])
        np.testing.assert_allclose(
            single.topk.logprobs[:, :columns], translation.topk.logprobs[:, :columns], atol=1e-6
        )
        for name in ("token_logprobs", "tail_logprobs"):
            expected = getattr(single.topk, name)
            np.testing.assert_allclose(getattr(translation.topk, name), expected, atol=1e-6)
        for name in ("named_mass", "lost_top1", "has_signal"):
            expected = getattr(single.coverage, name)
            np.testing.assert_allclose(getattr(translation.coverage, name), expected, atol=1e-6)


def test_no_completions_have_no_translations() -> None:
    translator = translator_of(pair_of("merging", 0))
    pending = translator.begin([], [])
    assert pending.extra_rows == []
    assert pending.translations() == []


def hand_made(teacher_tokens: Sequence[str], *texts: str) -> tuple[SharedTexts, TokenSequence]:
    """Equally likely texts; the student has the tokens `ab` and `cd`."""
    pair = Pair(
        merging_tokenizer(("ab", "cd"), "<over>"), merging_tokenizer(teacher_tokens, "<stop>")
    )
    shared = SharedTexts(pair, dict.fromkeys(texts, 1 / len(texts)))
    return shared, shared.completion(texts[0])


def test_a_teacher_token_of_several_student_tokens_has_a_name() -> None:
    shared, completion = hand_made(("ab", "cd", "abcd"), "x", "abcd", "abcd!", "abcd?")
    [translation], _ = shared.translated(translator_of(shared.pair), [completion])
    [ab] = shared.pair.student.ids(["ab"])
    assert translation.topk.ids[0, 0] == ab
    assert math.exp(translation.topk.logprobs[0, 0]) == pytest.approx(0.75, abs=EXACT)
    assert not translation.coverage.lost_top1.any()


def test_a_longer_student_token_is_found_with_an_extra_row() -> None:
    """The teacher's `a` is the student's `a` or the beginning of `ab`."""
    shared, completion = hand_made((), "x", "ab", "ac", "ab!")
    [translation], known = shared.translated(translator_of(shared.pair), [completion])
    assert ExtraRow(0, 0, tuple(shared.pair.teacher.ids(["a"]))) in known
    names = dict(zip(translation.topk.ids[0], np.exp(translation.topk.logprobs[0]), strict=True))
    x, a, ab = shared.pair.student.ids(["x", "a", "ab"])
    assert [names[each] for each in (x, a, ab)] == pytest.approx([0.25, 0.25, 0.5], abs=EXACT)


@pytest.mark.parametrize("control_mass", [0.005, 0.6])
def test_control_tokens_of_the_teacher_only_are_tail(control_mass: float) -> None:
    """The student has no token for them, so that no entry is uncertain because of them."""
    student, teacher = (Encoder(make()) for make in (student_tokenizer, words_teacher_tokenizer))
    encoders = [TextEncoder(e.tokenizer.backend_tokenizer, e.table) for e in (student, teacher)]
    translator = Translator(student.table, encoders[0], teacher.table, encoders[1])
    [cat], ids = student.part("cat"), [*teacher.part("cat"), teacher.end_of_turn]
    controls = teacher.tokenizer.convert_tokens_to_ids(["[INST]", "[/INST]"])
    masses = np.log([1 - control_mass, control_mass / 2, control_mass / 2])
    logprobs = np.stack([masses, [0.0, -np.inf, -np.inf]]).astype(np.float32)
    topk = TopKLogprobs(
        np.array([[ids[0], *controls], [ids[1], -1, -1]], dtype=np.int32),
        logprobs,
        logprobs[:, 0],
        np.full(2, -np.inf, dtype=np.float32),
    )
    score = TeacherScore("teacher", teacher.table.sequence(ids), topk)
    completion = student.table.sequence([cat, student.end_of_turn])
    [translation] = translator.begin([completion], [score]).translations()
    assert translation.topk.ids[0, 0] == cat
    named = translation.coverage.named_mass
    np.testing.assert_allclose(named, [1 - control_mass, 1], atol=EXACT)
    assert translation.coverage.lost_top1.tolist() == [control_mass > 0.5, False]


@settings(max_examples=15)
@given(problems(), st.sampled_from(("none", "entry", "realised", "mass", "lost")))
def test_the_checks_accept_the_truth_and_nothing_else(problem: Problem, fault: str) -> None:
    translations = problem.translated(Faulty(TrueTranslator(problem.shared), fault))
    failed = set[str]()
    for check in CHECKS:
        try:
            check(problem, translations)
        except AssertionError:
            failed.add(check.__name__)
    expected = {
        "none": set[str](),
        "entry": {"check_form", "check_entries", "check_coverage"},
        "realised": {"check_realised"},
        "mass": {"check_coverage"},
        "lost": {"check_coverage"},
    }
    assert failed == expected[fault]


@dataclass(frozen=True, eq=False)
class Faulty:
    """The truth with one fault in the first row."""

    translator: TrueTranslator
    fault: str

    def begin(
        self, completions: Sequence[TokenSequence], scores: Sequence[TeacherScore]
    ) -> TruePending:
        first, *others = self.translator.begin(completions, scores).translations()
        topk, coverage = first.topk, first.coverage
        if self.fault == "entry":
            topk = replace(topk, logprobs=topk.logprobs - 0.5)
        elif self.fault == "realised":
            topk = replace(topk, token_logprobs=topk.token_logprobs - 2.0)
        elif self.fault == "mass":
            coverage = replace(coverage, named_mass=coverage.named_mass - 0.01)
        elif self.fault == "lost":
            coverage = replace(coverage, lost_top1=~coverage.lost_top1)
        return TruePending([Translation(topk, coverage), *others])


def test_realised_tokens_without_probability_are_no_error() -> None:
    shared, completion = hand_made((), "abab", "x")
    score = shared.score(completion)
    for nats in (-np.inf, -9999.0):
        topk = replace(score.topk, token_logprobs=np.full_like(score.topk.token_logprobs, nats))
        impossible = TeacherScore("teacher", score.completion, topk)
        pending = translator_of(shared.pair).begin([completion], [impossible])
        [translation] = pending.translations()
        check_form(Problem(shared, [completion]), [translation])
