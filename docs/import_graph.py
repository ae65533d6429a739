"""Draw the folders of the packages and the imports between them, from the source."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.svg import INK, box, drawing, line, text

ROOT = Path(__file__).parents[1]
_BOX_HEIGHT, _ROW_HEIGHT, _TITLE_HEIGHT = 26, 58, 34

#: Importing unit -> imported units; a unit is a folder or a module of a package.
Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Panel:
    """One package: its frame on the canvas and its color."""

    package: str
    folder: str
    title: str
    x: float
    width: float
    color: str
    fill: str

    def rows(self) -> list[list[str]]:
        """Return the units by depth: the first row is imported by no other unit of the package."""
        graph = folder_graph(self.package, ROOT / self.folder)
        depths = {unit: _depth(unit, graph) for unit in graph}
        return [
            sorted(unit for unit in graph if depths[unit] == depth)
            for depth in sorted(set(depths.values()), reverse=True)
        ]

    def height(self) -> float:
        """Return the height of the frame."""
        return _TITLE_HEIGHT + _ROW_HEIGHT * len(self.rows())


MOPD = Panel("mopd", "mopd", "mopd: front door", 370, 260, "#6d4c41", "#efebe9")
TRAINER = Panel(
    "mopd_trainer", "trainer/mopd_trainer", "trainer: mopd train", 15, 610, "#3949ab", "#e8eaf6"
)
SERVER = Panel(
    "mopd_server", "server/mopd_server", "server: mopd-teacher", 645, 340, "#00897b", "#e0f2f1"
)
CLIENT = Panel("mopd_client", "client/mopd_client", "client: HTTP", 15, 300, "#c62828", "#ffebee")
LOSSES = Panel("mopd_losses", "losses/mopd_losses", "losses: torch", 335, 290, "#ef6c00", "#fff3e0")
PROTOCOL = Panel(
    "mopd_protocol", "protocol/mopd_protocol", "protocol: numpy", 15, 970, "#455a64", "#eceff1"
)


def folder_graph(package: str, folder: Path) -> Graph:
    """Return the imports between the folders and top-level modules of a package."""
    graph: dict[str, set[str]] = {
        path.stem: set()
        for path in folder.iterdir()
        if (path.suffix == ".py" or any(path.glob("*.py"))) and not path.name.startswith("__")
    }
    for path in sorted(folder.rglob("*.py")):
        unit = path.relative_to(folder).parts[0].removesuffix(".py")
        for module in _imported_modules(path):
            parts = module.split(".")
            if unit in graph and parts[0] == package and len(parts) > 1 and parts[1] in graph:
                graph[unit] |= {parts[1]} - {unit}
    return {unit: frozenset(imported) for unit, imported in graph.items()}


@cache
def _imported_modules(path: Path) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def _depth(unit: str, graph: Graph) -> int:
    """Length of the longest chain of imports that starts at a unit."""
    return max((1 + _depth(imported, graph) for imported in graph[unit]), default=0)


def _reduced(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the imports that no longer chain implies."""

    def reachable(unit: str) -> set[str]:
        return set(graph[unit]).union(*map(reachable, graph[unit]))

    for unit, imported in graph.items():
        implied = set[str]().union(*map(reachable, imported))
        yield from ((unit, direct) for direct in sorted(imported - implied))


def _draw_panel(panel: Panel, y: float, height: float) -> list[str]:
    graph = folder_graph(panel.package, ROOT / panel.folder)
    parts = [
        box(panel.x, y, panel.width, height, panel.color),
        text(panel.x + 12, y + 21, panel.title, anchor="start", fill=panel.color, weight="bold"),
    ]
    centers: dict[str, tuple[float, float]] = {}
    boxes: list[str] = []
    rows = panel.rows()
    spare = height - _TITLE_HEIGHT - _ROW_HEIGHT * len(rows)
    for number, row in enumerate(rows):
        above = {unit: [centers[u][0] for u in centers if unit in graph[u]] for unit in row}
        row = sorted(row, key=lambda unit: (sum(above[unit]) / max(1, len(above[unit])), unit))
        widths = [7.4 * len(unit) + 16 for unit in row]
        gap = (panel.width - sum(widths)) / (len(row) + 1)
        x = panel.x
        top = y + _TITLE_HEIGHT + (number + 0.5) * spare / len(rows) + number * _ROW_HEIGHT
        for unit, width in zip(row, widths, strict=True):
            x += gap
            boxes.append(box(x, top, width, _BOX_HEIGHT, panel.color, fill=panel.fill))
            boxes.append(text(x + width / 2, top + 17, unit, size=12))
            centers[unit] = (x + width / 2, top)
            x += width
    for unit, imported in _reduced(graph):
        (x1, y1), (x2, y2) = centers[unit], centers[imported]
        parts.append(line(x1, y1 + _BOX_HEIGHT, x2, y2, panel.color, arrow=True, width=1))
    return [*parts, *boxes]


def import_graph() -> str:
    """Draw all packages; arrows that follow from other arrows are omitted."""
    gap, top = 46.0, 15.0
    trainer_top = top + MOPD.height() + gap
    lower_top = trainer_top + TRAINER.height() + gap
    lower_height = max(CLIENT.height(), LOSSES.height())
    protocol_top = lower_top + lower_height + gap
    server_height = protocol_top - gap - trainer_top
    parts = [
        *_draw_panel(MOPD, top, MOPD.height()),
        *_draw_panel(TRAINER, trainer_top, TRAINER.height()),
        *_draw_panel(SERVER, trainer_top, server_height),
        *_draw_panel(CLIENT, lower_top, lower_height),
        *_draw_panel(LOSSES, lower_top, lower_height),
        *_draw_panel(PROTOCOL, protocol_top, PROTOCOL.height()),
    ]
    for x, bottom in (
        (400, trainer_top),
        (628, trainer_top),
        (165, lower_top),
        (480, lower_top),
        (165, protocol_top),
        (480, protocol_top),
        (815, protocol_top),
    ):
        shift = 30 if x == 628 else 0
        parts.append(line(x - shift, bottom - gap, x + shift, bottom, INK, arrow=True, width=2.5))
    height = int(protocol_top + PROTOCOL.height() + 15)
    return drawing(1000, height, "Imports between the packages and their folders", parts)
