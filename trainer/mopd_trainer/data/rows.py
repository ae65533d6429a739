"""Rows of a data file: JSONL, parquet, or a dataset of Hugging Face."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mopd_protocol.errors import DataError, MissingPackageError
from mopd_trainer.config.data import DataConfig

Row = bytes | dict[str, Any]
#: Rows of a parquet file in memory at once.
_BATCH = 1_024


def read_rows(config: DataConfig) -> Iterator[tuple[str, Row]]:
    """Yield the place of each row in its file, and its line of JSON or its columns.

    Raises:
        DataError: if the data is not found or cannot be read; ``key`` is the file.
        MissingPackageError: if reading needs pyarrow or datasets, which are optional.
    """
    path = config.prompts
    if config.split is not None:
        yield from _dataset_rows(config)
    elif path.suffix == ".parquet" and path.is_file():
        yield from _parquet_rows(path)
    elif path.is_file():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    else:
        problem = "is a folder" if path.is_dir() else "file not found"
        raise DataError(
            f"{path}: {problem}, expected prompts as JSONL or parquet (data.prompts). For a "
            "dataset of Hugging Face, set data.split.",
            key=str(path),
        )


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    parquet = _package("pyarrow.parquet", f"{path}: parquet files")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{path}: invalid parquet file after row {number}: {reason}", key=str(path)
        ) from error


def _dataset_rows(config: DataConfig) -> Iterator[tuple[str, Row]]:
    datasets = _package("datasets", f"data.split: dataset {config.prompts}")
    name = config.prompts
    try:
        if (name / "dataset_dict.json").is_file():
            rows: Any = datasets.load_from_disk(str(name))[config.split]
        else:
            rows = datasets.load_dataset(str(name), config.subset, split=config.split)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{name}: split {config.split!r} cannot be loaded: {reason}", key=str(name)
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{name}:{number}", dict(row)


def _package(module: str, subject: str) -> Any:
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise MissingPackageError(
            f"{subject} need package {package}, which is not installed. Run pip install "
            "'.[data]', or convert the data to JSONL.",
            key=package,
        )
    return import_module(module)
