"""Prefix KL's preparation on published vocabularies, against one boundary and unit at a time."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.core.loss import AlignedPair
from mopd_losses.prefix import shared_units
from mopd_losses.prefix.junctions import Junctions
from mopd_losses.prefix.preparation import prefix_targets
from mopd_losses.prefix.shared_units import SharedUnits
from mopd_losses.prefix.targets import PrefixTargets
from mopd_protocol.samples import TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.prefix_pairs import ids_read
from tests.real_vocabularies import MIXED_TEXT, Vocabulary, real
from tests.reference import prefix_places as slow
from tests.reference.prefix_places import Place, Reading

pairs = pytest.mark.parametrize(
    ("student", "teacher"), [("v3", "python_50k"), ("python_50k", "v3"), ("v3", "v3")]
)
TEXTS = [
    MIXED_TEXT[20:50] + MIXED_TEXT[130:160],
    "def returned(values):\n        return [value.strip() for v in values]\n\n",
    "The sum of 12345 and 678 is 13023; nothing      remains.\n",
    "The student splits completions, sampled and scored; prompts are remembered, じり ми.\n",
]


@cache
def units_of(student: str, teacher: str) -> SharedUnits:
    sides = real(student), real(teacher)
    return SharedUnits(sides[0].table, sides[0].encoder, sides[1].table, sides[1].encoder)


def scored(student: Vocabulary, teacher: Vocabulary, text: str, seed: int, k: int) -> AlignedPair:
    """With a teacher that knows any tokens, and those that begin as the text goes on."""
    draw = random.Random(seed)
    ours = student.encoder.encode(text)
    # What a model samples is not always what its tokenizer would write.
    cut = draw.randrange(len(text))
    ours = (
        ours
        if seed % 2
        else student.encoder.encode(text[:cut]) + student.encoder.encode(text[cut:])
    )
    sequences = student.table.sequence(ours), teacher.table.sequence(teacher.encoder.encode(text))
    read = sequences[1]
    known = {
        spelled: token_id for token_id, spelled in enumerate(teacher.table.all_bytes) if spelled
    }
    rows, start = len(read), 0
    ids = np.full((rows, k), -1)
    for row, (end, own) in enumerate(
        zip(read.byte_ends.tolist(), read.token_ids.tolist(), strict=True)
    ):
        ahead = [known.get(read.text[start : start + n]) for n in range(1, 9)]
        likely = [own if draw.random() < 0.8 else None, *ahead]
        others = draw.sample(sorted(known.values()), k)
        chosen = [token_id for token_id in (*likely, *others) if token_id is not None]
        ids[row] = list(dict.fromkeys(chosen))[:k]
        start = end
    logits = np.sort(np.random.default_rng(seed).normal(0, 3, (rows, k + 1)))[:, ::-1]
    logprobs = (logits - np.logaddexp.reduce(logits, axis=1)[:, None]).astype(np.float32)
    is_own = ids == read.token_ids[:, None]
    of_own = np.where(is_own.any(axis=1), logprobs[np.arange(rows), is_own.argmax(axis=1)], -9.0)
    topk = TopKLogprobs(
        ids=ids.astype(np.int32),
        logprobs=logprobs[:, :k],
        token_logprobs=of_own.astype(np.float32),
        tail_logprobs=logprobs[:, k],
    )
    sampled = np.zeros(len(ours), dtype=np.float32)
    return AlignedPair(
        sequences[0], sampled, TeacherScore("teacher", read, topk), align(*sequences)
    )


def as_places(targets: PrefixTargets, written: list[int]) -> list[Place]:
    """The targets in the slow form."""
    first_positions = targets.first_positions.tolist()

    def reading(place: int, position: int, token_id: int, path: int) -> Reading:
        steps = targets.step_ids[targets.step_paths == path].tolist()
        assert steps == written[first_positions[place] : position]
        return position, token_id, tuple(steps)

    events: list[dict[int, set[Reading]]] = [{} for _ in first_positions]
    known: list[set[Reading]] = [set() for _ in first_positions]
    for place, column, position, token_id, path in ids_read(targets, targets.named).tolist():
        read = events[place].setdefault(column, set())
        assert reading(place, position, token_id, path) not in read
        read.add(reading(place, position, token_id, path))
    for place, _, position, token_id, path in ids_read(targets, targets.known).tolist():
        known[place].add(reading(place, position, token_id, path))
    return [
        Place(
            position=position,
            first_position=first_positions[place],
            events=[
                (frozenset(events[place].get(column, ())), nats)
                for column, nats in enumerate(targets.events[place].tolist())
                if nats > -np.inf
            ],
            rest=targets.rests[place].item(),
            path_mass=targets.path_masses[place].item(),
            known=frozenset(known[place]),
        )
        for place, position in enumerate(targets.positions.tolist())
    ]


def by_readings(
    events: list[tuple[frozenset[Reading], float]],
) -> list[tuple[list[Reading], float]]:
    return sorted((sorted(read), nats) for read, nats in events)


@pairs
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1, 2, 3])
def test_places_equal_those_found_one_by_one(student: str, teacher: str, seed: int) -> None:
    check_places(student, teacher, seed)


def test_with_few_extensions_places_equal_those_found_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_units, "MOST_EXTENSIONS", 3)
    check_places("v3", "python_50k", 1)


def check_places(student: str, teacher: str, seed: int) -> None:
    units = units_of(student, teacher)
    targets = check_same_places(
        scored(real(student), real(teacher), TEXTS[seed], seed, k=16), units
    )
    if seed == 3:
        assert targets.are_spans.any() == (student != teacher)


def check_same_places(comparison: AlignedPair, units: SharedUnits) -> PrefixTargets:
    targets = prefix_targets([comparison], [0], Junctions(units), mass_floor=0.0)
    found = as_places(targets, comparison.student.token_ids.tolist())
    expected = slow.places(comparison, units)
    assert [place.position for place in found] == [place.position for place in expected]
    for place, exact in zip(found, expected, strict=True):
        assert place.first_position == exact.first_position
        assert place.known == exact.known
        assert place.rest == pytest.approx(exact.rest, abs=1e-9)
        assert place.path_mass == pytest.approx(exact.path_mass, abs=1e-12)
        ours, theirs = by_readings(place.events), by_readings(exact.events)
        assert [read for read, _ in ours] == [read for read, _ in theirs]
        assert [nats for _, nats in ours] == pytest.approx([nats for _, nats in theirs], abs=1e-9)
    return targets


@pytest.mark.parametrize("teacher", ["python_50k", "v3"])
def test_a_control_token_sent_as_text_is_read_whole_or_not_at_all(teacher: str) -> None:
    # The student wrote a control token that the teacher does not know, and was read as its name.
    text = "return [value for value in values]"
    whole = scored(real("v3"), real(teacher), text, seed=1, k=16)
    ours, table = whole.student, real("v3").table
    control = next(i for i in table.controls.values() if i not in table.roles.ending)
    ids, ends = ours.token_ids.copy(), ours.byte_ends.tolist()
    at = next(row for row in range(2, len(ids)) if ends[row] - ends[row - 1] > 2)
    ids[at] = control
    comparison = replace(whole, student=replace(ours, token_ids=ids))
    units = units_of("v3", teacher)
    check_same_places(comparison, units)
    targets = prefix_targets([comparison], [0], Junctions(units), mass_floor=0.0)
    assert control not in ids_read(targets, targets.named)[:, 3].tolist()
