"""``TeacherTokenizer``: a teacher's tokenizer on the student's side, fetched from the teacher."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


@dataclass(frozen=True, eq=False)
class TeacherTokenizer:
    """The tokenizer, the bytes of its tokens, and its form for completions."""

    tokenizer: Tokenizer
    table: TokenTable
    encoder: TextEncoder


def teacher_tokenizer(teacher: str, manifest: Manifest, tokenizer_json: str) -> TeacherTokenizer:
    """Builds a teacher's tokenizer out of its ``tokenizer.json``.

    Raises:
        TeacherError: when the text is no tokenizer, or not the one that the manifest names.
    """
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise TeacherError(f"teacher {teacher!r} sent no tokenizer: {error}") from error
    try:
        table = TokenTable.from_tokenizer(tokenizer, manifest.roles)
    except DataError as error:
        raise TeacherError(f"teacher {teacher!r} sent an unfit tokenizer: {error}") from error
    if table.fingerprint != manifest.tokenizer_fingerprint:
        raise TeacherError(
            f"teacher {teacher!r} sent tokenizer {table.fingerprint[:12]}, but its manifest names "
            f"{manifest.tokenizer_fingerprint[:12]}; run the same mopd and tokenizers versions on "
            "both sides"
        )
    return TeacherTokenizer(tokenizer, table, TextEncoder(tokenizer, table))
