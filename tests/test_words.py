"""Tests of the wording: files keep to the field's standard English (`tests/words.py`)."""

from tests import words


def test_no_file_exceeds_its_recorded_count() -> None:
    """A file has at most its recorded count of matches; a file without a record has none."""
    record = words.recorded()
    excess = {
        path: [f"{path}:{match.line}: {match.excerpt} [{match.rule}]" for match in matches]
        for path, matches in words.count_words().items()
        if len(matches) > record.get(path, 0)
    }
    assert not excess, "\n".join(line for lines in excess.values() for line in lines)


def test_total_is_below_the_bar() -> None:
    """The total of all files is at most the recorded bar, and 5 % of the base revision's."""
    record = words.recorded()
    total = sum(len(matches) for matches in words.count_words().values())
    assert total <= record["bar"] <= 0.05 * record["base"]


def test_each_rule_has_a_match_and_standard_terms_have_none() -> None:
    """Typical sentences match once; their standard equivalents do not match."""
    text = (
        "The teacher is asked. A judge says it. Weights of now stand beside it, left alone. "
        "A run goes\non by itself; nobody gives up."
    )
    assert len(list(words.matches_of_prose(text, 1))) == 11
    standard = (
        "The run lock is held by a stand-alone process. Scores are requested for the held-out "
        "set; there are no reference answers. The property holds for all k."
    )
    assert not [match.excerpt for match in words.matches_of_prose(standard, 1)]


def test_names_comments_docstrings_and_strings_of_python_are_counted() -> None:
    """Each part of a Python file that a person reads is counted, with its line."""
    source = '''"""Whether a run resumes."""


def is_asked(given):
    # What follows.
    found = f"teacher {given} says {given}"
    return found
'''
    matches = words.matches_of_file("example.py", source)
    assert [match.line for match in matches] == [1, 4, 4, 5, 6, 6]
