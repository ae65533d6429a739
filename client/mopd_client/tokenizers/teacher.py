"""A teacher's tokenizer on the student's side, from the file that a service sends."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from tokenizers import Tokenizer

from mopd_protocol.errors import DataError, InvalidResponseError, TeacherError, TeacherMismatchError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


@dataclass(frozen=True, eq=False)
class DownloadedTokenizer(TeacherTokenizer):
    """A ``TeacherTokenizer`` with the files of its chat template, as the service sent them."""

    files: Mapping[str, str] = field(default_factory=dict[str, str])


def teacher_tokenizer(
    teacher: str,
    manifest: Manifest,
    tokenizer_json: str,
    files: Mapping[str, str] = MappingProxyType({}),
) -> DownloadedTokenizer:
    """Build a teacher's tokenizer from its ``tokenizer.json``.

    Args:
        files: name -> text of other files of the tokenizer.

    Raises:
        InvalidResponseError: if the text is not a supported tokenizer.
        TeacherMismatchError: if the tokenizer is not the manifest's.
    """
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise InvalidResponseError(
            f"teacher {teacher!r}: invalid tokenizer: {error}", key="tokenizer.json"
        ) from error
    try:
        table = TokenTable.from_tokenizer(tokenizer, manifest.roles)
    except DataError as error:
        raise InvalidResponseError(
            f"teacher {teacher!r}: unsupported tokenizer: {error}", key="tokenizer.json"
        ) from error
    if table.fingerprint != manifest.tokenizer_fingerprint:
        raise TeacherMismatchError(
            f"teacher {teacher!r}: tokenizer differs from the manifest's (found "
            f"{table.fingerprint[:12]}, expected {manifest.tokenizer_fingerprint[:12]}). Run the "
            "same mopd and tokenizers versions on both sides",
            key="tokenizer_fingerprint",
        )
    # The fingerprint does not cover these: they do not belong to the tokenizer's vocabulary.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return DownloadedTokenizer(tokenizer, table, TextEncoder(tokenizer, table), files)


@contextmanager
def rejections_of(teacher: str) -> Generator[None]:
    """Name the teacher in the errors of its ``RequestTokenizer``."""
    try:
        yield
    except TeacherError as error:
        raise TeacherError(
            f"teacher {teacher!r} rejects the sequence: {error}",
            status=error.status,
            key=error.key,
        ) from error
