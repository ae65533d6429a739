"""Rows of a data file: JSONL, an array of JSON, parquet, or a dataset of Hugging Face."""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mopd_protocol.errors import DataError, MissingPackageError
from mopd_trainer.config.data import DataConfig

Row = bytes | dict[str, Any]
#: Columns of a dataset that are not decoded, for which it needs more packages.
_MEDIA = re.compile(r"(List|LargeList|Sequence)?\W*(feature=)?(Image|Audio|Video|Pdf|Nifti)\(")
#: Rows of a parquet file in memory at once.
_BATCH = 1_024


def read_rows(config: DataConfig) -> Iterator[tuple[int, Row]]:
    """Yield the number of each row, from 1, and its line of JSON or its columns.

    Raises:
        DataError: if the data is not found or cannot be read; ``key`` is the file.
        MissingPackageError: if reading needs pyarrow or datasets, which are optional.
    """
    path = config.prompts
    if config.split is not None:
        yield from _dataset_rows(config)
    elif path.suffix == ".parquet" and path.is_file():
        yield from _parquet_rows(path)
    elif path.suffix == ".json" and path.is_file() and _first_character(path) == b"[":
        yield from _array_rows(path)
    elif path.is_file():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    else:
        problem = "is a folder" if path.is_dir() else "file not found"
        raise DataError(
            f"{path}: {problem}, expected prompts as JSONL or parquet (data.prompts). For a "
            "dataset of Hugging Face, set data.split.",
            key=str(path),
        )


def _first_character(path: Path) -> bytes:
    with path.open("rb") as opened:
        return opened.read(1_024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _array_rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        rows: list[Any] = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid JSON: {error}", key=str(path)) from error
    yield from enumerate(rows, start=1)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    parquet = _package("pyarrow.parquet", f"{path}: parquet files")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{path}: invalid parquet file after row {number}: {reason}", key=str(path)
        ) from error


def _dataset_rows(config: DataConfig) -> Iterator[tuple[int, Row]]:
    datasets = _package("datasets", f"data.split: dataset {config.prompts}")
    name = config.prompts
    number = 0
    try:
        if (name / "dataset_dict.json").is_file():
            rows: Any = datasets.load_from_disk(str(name))[config.split]
        elif (name / "state.json").is_file():  # one split, saved without its name
            rows = datasets.load_from_disk(str(name))
        else:
            rows = datasets.load_dataset(str(name), config.subset, split=config.split)
        media = [key for key, feature in rows.features.items() if _MEDIA.match(repr(feature))]
        rows = rows.with_format(None, columns=[key for key in rows.features if key not in media])
        for number, row in enumerate(rows, start=1):
            yield number, {**row, **dict.fromkeys(media, "not loaded")}
    except (OSError, ValueError, KeyError, ImportError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        after = f" after row {number}" if number else ""
        raise DataError(
            f"{name}: split {config.split!r} cannot be loaded{after}: {reason}", key=str(name)
        ) from error


def _package(module: str, subject: str) -> Any:
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise MissingPackageError(
            f"{subject} need package {package}, which is not installed. Run pip install "
            "'.[data]', or convert the data to JSONL.",
            key=package,
        )
    return import_module(module)
