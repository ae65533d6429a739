"""The same tokenizer with its ids renumbered."""

import json
import random

from tokenizers import Tokenizer

from mopd_protocol.tokenizers.token_table import TokenRoles
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from tests.losses.families import Family, family_of


def permuted(side: Family, seed: int = 0, ids: dict[int, int] | None = None) -> Family:
    """Ids shuffled, or renumbered by ``ids``; control tokens move with the rest."""
    description = tokenizer_json(side.tokenizer)
    vocabulary: dict[str, int] = description["model"]["vocab"]
    if ids is None:
        old = sorted(vocabulary.values())
        new = random.Random(seed).sample(old, len(old))
        ids = dict(zip(old, new, strict=True))
    description["model"]["vocab"] = {name: ids[token] for name, token in vocabulary.items()}
    for token in description["added_tokens"]:
        token["id"] = ids[token["id"]]
    description["added_tokens"].sort(key=lambda token: token["id"])
    roles = {
        name: None if token is None else ids[token]
        for name, token in side.table.roles.model_dump().items()
    }
    tokenizer = Tokenizer.from_str(json.dumps(description))
    return family_of(tokenizer, TokenRoles(**roles), side.logit_width - side.table.size)
