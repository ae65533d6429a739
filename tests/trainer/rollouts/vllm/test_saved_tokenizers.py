"""vLLM loads the tokenizer of a saved folder as the student was trained with."""

from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer_families import FAMILIES
from tests.trainer.student.test_reload import FOREIGN, assert_same_tokenizer, published, saved
from tests.vllm_marks import needs_vllm

pytestmark = needs_vllm


@pytest.mark.parametrize("trusted", [False, True])
def test_vllm_loads_the_saved_tokenizer(tmp_path: Path, trusted: bool) -> None:
    from vllm.tokenizers import get_tokenizer

    for family in FAMILIES:
        for name in (family, FOREIGN[family]):
            source, folder = tmp_path / f"{family}-{name}", tmp_path / f"{family}-{name}-saved"
            saved(published(family, name, source), folder)
            loaded: Any = get_tokenizer(str(folder), trust_remote_code=trusted)
            assert_same_tokenizer(loaded, source)
