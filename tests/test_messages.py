"""Tests of the snapshot of all error messages (`tests/messages.txt`)."""

from tests import messages, words


def test_snapshot_is_current() -> None:
    """The snapshot equals the messages in the code; `make messages` regenerates it."""
    assert messages.SNAPSHOT.read_text() == messages.snapshot(messages.collect())


def test_messages_are_in_standard_english() -> None:
    """No sentence has a word that `tests/words.py` counts."""
    matches = {
        message.template: [match.rule for match in words.matches_of_prose(message.template, 1)]
        for entries in messages.collect().values()
        for message in entries
    }
    assert not {template: rules for template, rules in matches.items() if rules}


def test_errors_of_the_tree_have_codes() -> None:
    """Every error class of the project has a code, and each message has a sentence."""
    entries = [entry for group in messages.collect().values() for entry in group]
    assert len(entries) > 200
    coded = {entry.error for entry in entries if entry.code}
    assert {"ConfigError", "DataError", "ServiceError"} <= coded
