"""Tests of the table of planted faults (`tests/mutants.toml`)."""

import pytest

from tests.mutants import ROOT, TIERS, Mutant, load_mutants


@pytest.mark.parametrize("mutant", load_mutants(), ids=lambda mutant: mutant.id)
def test_each_fault_applies_once_and_compiles(mutant: Mutant) -> None:
    """The replaced text occurs once, a changed module compiles, and the tests exist."""
    source = (ROOT / mutant.file).read_text()
    changed = mutant.apply(source)
    assert changed != source
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert mutant.tests
    assert all((ROOT / path).exists() for path in mutant.tests)
    assert mutant.tier in TIERS


def test_fault_ids_are_unique() -> None:
    """`-k` selects by id."""
    ids = [mutant.id for mutant in load_mutants()]
    assert len(set(ids)) == len(ids)
