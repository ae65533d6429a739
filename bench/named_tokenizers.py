"""Tokenizers that benchmarks take by name, and pairs of them.

A name is one of ``tests/real_vocabularies.py`` (tekken, v1, v3, python_50k, …), a
``tokenizer.json``, or a folder that contains one.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from mopd_protocol import TextEncoder, TokenRoles, TokenTable
from tests.real_vocabularies import PUBLISHED, tokenizer_and_roles

PAIRS = "tekken:v3,v3:tekken,tekken:python_50k,python_50k:tekken,v1:python_50k,python_50k:v1"


@dataclass(frozen=True, eq=False)
class Side:
    """One tokenizer, as losses expect it."""

    table: TokenTable
    encoder: TextEncoder

    @property
    def logit_width(self) -> int:
        """Rows of the head."""
        return self.table.size


def pairs_of(parser: argparse.ArgumentParser, value: str) -> list[tuple[str, ...]]:
    """Read ``STUDENT:TEACHER,…``; anything else, or an unknown tokenizer, ends the program."""
    pairs = [tuple(pair.split(":")) for pair in value.split(",")]
    if not all(len(pair) == 2 for pair in pairs):
        parser.error(f"--pairs: found {value!r}, expected STUDENT:TEACHER,…")
    for name in {*chain(*pairs)}.difference(PUBLISHED):
        path = Path(name)
        if not (path / "tokenizer.json" if path.is_dir() else path).is_file():
            parser.error(
                f"--pairs: found no tokenizer {name!r}, expected one of "
                f"{', '.join(sorted(PUBLISHED))}, a tokenizer.json, or a folder that contains one"
            )
    return pairs


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name of each tokenizer: the last part of its path that no other one has."""
    paths = {
        name: [*path.resolve().parent.parts] if path.name == "tokenizer.json" else [path.stem]
        for name in names
        for path in [Path(name)]
    }
    shorts: dict[str, str] = {}
    for name, parts in paths.items():
        others = [other[::-1] for key, other in paths.items() if key != name]
        own = enumerate(reversed(parts))
        unique = (part for at, part in own if all(other[at : at + 1] != [part] for other in others))
        shorts[name] = next(unique, parts[-1])
    return shorts


def tokenizer_of(name: str) -> tuple[Tokenizer, TokenRoles]:
    """A tokenizer by name, file or folder."""
    path = Path(name)
    if path.exists():
        file = path / "tokenizer.json" if path.is_dir() else path
        return Tokenizer.from_file(str(file)), TokenRoles()
    return tokenizer_and_roles(name)


@cache
def side(name: str) -> Side:
    """A tokenizer by name, file or folder."""
    tokenizer, roles = tokenizer_of(name)
    table = TokenTable.from_tokenizer(tokenizer, roles)
    return Side(table, TextEncoder(tokenizer, table))
