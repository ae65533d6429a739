"""The alignment explorer: a page for one text, or a server that aligns any text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mopd_protocol.errors import DataError
from mopd_trainer.inspection.explorer import Explorer
from mopd_trainer.pages.document import document
from mopd_trainer.pages.report import write_page
from mopd_trainer.pages.server import PageServer

#: Shown without a text of the user.
SAMPLE = (
    "Grüße! In 2024, 12,345 people counted 3.14159 apples.\n"
    "def f(x):\n    return x ** 2  # 的 漢字 👩‍🚀 naïve cafés\n"
)


def write_alignment(explorer: Explorer, text: str, path: Path) -> Path:
    """Write the page of a text with all equal-belief checks; return its path.

    Raises:
        DataError: if the text is too long or has no UTF-8 encoding.
        DiskError: if writing fails.
    """
    teachers = range(1, len(explorer.tokenizers))
    data = _data(explorer, text, live=False)
    data["beliefs"] = {str(teacher): explorer.beliefs(text, teacher) for teacher in teachers}
    return write_page(document("alignment", _title(explorer), data), path)


def alignment_server(explorer: Explorer, text: str, *, host: str, port: int) -> PageServer:
    """Return a server of the page, which aligns and checks texts on request.

    Raises:
        ConfigError: if the address is not available.
    """

    # Before the address is printed: the projections of large vocabularies take seconds.
    document_of_text = document(
        "alignment", _title(explorer), _data(explorer, text, live=True), served=True
    )

    def aligned(parameters: Mapping[str, Any]) -> Any:
        return explorer.align(_text(parameters))

    def beliefs(parameters: Mapping[str, Any]) -> Any:
        teacher = int(parameters["teacher"])
        if not 0 < teacher < len(explorer.tokenizers):
            raise DataError(
                f"teacher: unknown (found {teacher}, expected 1 to {len(explorer.tokenizers) - 1})",
                key="teacher",
            )
        return explorer.beliefs(_text(parameters), teacher)

    return PageServer(
        lambda: document_of_text, {"align": aligned, "beliefs": beliefs}, host=host, port=port
    )


def _data(explorer: Explorer, text: str, *, live: bool) -> dict[str, Any]:
    aligned = explorer.align(text)
    return {"live": live, "tokenizers": explorer.facts(), "aligned": aligned, "beliefs": {}}


def _title(explorer: Explorer) -> str:
    names = (Path(each.name).name for each in explorer.tokenizers)
    return f"{' and '.join(names)} - mopd align"


def _text(parameters: Mapping[str, Any]) -> str:
    text = parameters["text"]
    if not isinstance(text, str):
        raise DataError(f"text: invalid (found {type(text).__name__}, expected text)", key="text")
    return text
