"""Session-wide teachers: frozen, and shared by many tests."""

import pytest

from tests.server.tiny_teachers import FAMILIES, TinyTeacher, teacher_of_family


@pytest.fixture(scope="session")
def teachers() -> dict[str, TinyTeacher]:
    """A teacher of each family."""
    return {family: teacher_of_family(family) for family in FAMILIES}


@pytest.fixture(scope="session")
def qwen_teacher(teachers: dict[str, TinyTeacher]) -> TinyTeacher:
    """The teacher for tests that do not depend on the family."""
    return teachers["qwen"]
