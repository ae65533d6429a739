"""Options of the command line: groups with the defaults of settings, and types of values."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)

#: One year: the system's clocks accept no infinite timeouts.
MAX_SECONDS = 31_536_000

MEBIBYTE = 1024 * 1024
_MAX_WEIGHT = 1000

#: Name of a teacher with others, a part of its address.
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


class OptionGroup:
    """A group of options with the defaults of a settings class."""

    def __init__(self, parent: argparse.ArgumentParser, title: str, defaults: type[Any]) -> None:
        self.group = parent.add_argument_group(title)
        self._defaults = defaults

    def add(self, flag: str, meaning: str, dest: str = "", **options: Any) -> None:
        """Add an option; its default, if any, is appended to ``meaning``."""
        dest = dest or flag.removeprefix("--").replace("-", "_")
        default = getattr(self._defaults, dest)
        if options.get("type") is mebibytes:
            default = str(default // MEBIBYTE)  # parsed by argparse
        if default is not None and not isinstance(default, bool | tuple):
            shown = "%(default)g" if isinstance(default, float) else "%(default)s"
            meaning = f"{meaning} (default: {shown})"
        self.group.add_argument(flag, dest=dest, default=default, help=meaning, **options)


class Append(argparse.Action):
    """Collect the values of a repeated option in a tuple."""

    def __call__(
        self, _: object, namespace: argparse.Namespace, value: object, __: str | None = None
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), value))


def pair(form: str) -> Callable[[str], str]:
    """Return a type for ``KEY=VALUE``, named by its form."""

    def parse(text: str) -> str:
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {form}")
        return text

    return parse


def named_model(text: str) -> tuple[str, str]:
    """Return the parts of ``NAME=MODEL``."""
    name, _, model = text.partition("=")
    if not (NAME.fullmatch(name) and model):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected NAME=MODEL, the name of letters, digits, '_', '.' and '-'"
        )
    return name, model


def weights(text: str) -> tuple[tuple[str, float], ...]:
    """Return the names and weights of ``NAME=WEIGHT,...``."""
    shares: list[tuple[str, float]] = []
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            shares.append((name.strip(), positive(float, at_most=_MAX_WEIGHT)(number)))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(
                f"found {part!r}, expected NAME=WEIGHT with a number above 0, up to {_MAX_WEIGHT}"
            ) from error
    return tuple(shares)


def positive(
    kind: Callable[[str], Number], at_most: float = math.inf, factor: int = 1
) -> Callable[[str], Number]:
    """Return a type for numbers above 0, multiplied by ``factor``."""

    def parse(text: str) -> Number:
        number = kind(text)
        if not 0 < number <= at_most:
            limit = "" if at_most == math.inf else f", up to {at_most}"
            raise argparse.ArgumentTypeError(f"found {text}, expected a number above 0{limit}")
        return number * factor

    parse.__name__ = "number"  # shown in argparse's own message
    return parse


mebibytes = positive(int, factor=MEBIBYTE)


def port(text: str) -> int:
    """Return the number of a port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {text}, expected 0 to 65535")
    return int(text)
