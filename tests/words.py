"""Count words and phrases outside the field's standard English, per file.

`python -m tests.words [PATH...]` prints every match below the given paths. The rules are in
`tests/words.toml`; AGENTS.md says what to write instead. `tests/test_words.py` keeps every file at
or below its count in `tests/words.txt`; `python -m tests.words --lower` lowers the recorded counts
to the current ones.

Counted are docstrings, comments, strings, the names a Python file defines, file names, Markdown,
and the comments of YAML, shell, TOML and Docker files.
"""

# ruff: noqa: T201

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "words.txt"
# A rule: its name (what to write instead) and its pattern.
RULES: dict[str, str] = tomllib.loads((ROOT / "tests" / "words.toml").read_text())
PATTERN = re.compile(
    "|".join(
        rf"(?P<r{number}>(?<![\w-])(?:{pattern.replace(' ', chr(92) + 's+')})(?![\w]))"
        for number, pattern in enumerate(RULES.values())
    ),
    re.IGNORECASE,
)
NAMES = list(RULES)

FRAGMENT = re.compile(
    r"\s*(?:Whether|Where|Who|Whose|Whom|What|That|Of|How|Which|Why|Those|Them|It|Its|They|Their"
    r"|Theirs|He|There)\b(?!\.\w)"
)
FRAGMENT_RULE = "docstring or comment that begins with Whether/Where/Who/What/That/Of/It/..."
LOCALS = re.compile(
    "_*(?:found|told|asked|given|made|said|ours|theirs|one|mine|his|them|held|taken|meant|wanted"
    "|brought|went|stood|its|it|that|those|these|there|here|gone|came|heard)_*"
)
LOCALS_RULE = "name that does not say what it holds (found, told, asked, given, made, one, ...)"

# The rules themselves, their record and generated files.
EXCLUDED = re.compile(r"tests/(test_)?words\.(py|txt|toml)|tests/messages\.txt|tests/mutants\.toml")


@dataclass(frozen=True)
class Match:
    """One match: its line, its rule and the text around it."""

    line: int
    rule: str
    excerpt: str


def matches_of_prose(text: str, line: int) -> Iterator[Match]:
    """Yield the matches in a text whose first line is number `line`; inline code is not counted."""
    text = re.sub(r"(`+)[^`\n]+\1|<\|\w+\|>", lambda code: "`" * len(code[0]), text)
    for match in PATTERN.finditer(text):
        rule = NAMES[int((match.lastgroup or "r0")[1:])]
        around = text[max(0, match.start() - 30) : match.end() + 30]
        excerpt = " ".join(around.split())
        yield Match(line + text.count("\n", 0, match.start()), rule, excerpt)


def words_of_name(name: str) -> str:
    """Split an identifier into words: `AskedTeacher_told` becomes `Asked Teacher told`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_\-/.]+", " ", name).strip()


def matches_of_name(name: str, line: int) -> Iterator[Match]:
    """Yield the matches in a name that is defined on `line`."""
    for match in matches_of_prose(words_of_name(name), line):
        yield Match(line, match.rule, name)


def fragment(text: str, line: int) -> Iterator[Match]:
    """Yield a match if the docstring or comment begins as a fragment or with a pronoun."""
    if FRAGMENT.match(text):
        yield Match(line, FRAGMENT_RULE, " ".join(text.split())[:60])


def comment_blocks(lines: list[tuple[int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Join comments on consecutive lines; yield the first line's number and the text.

    Each entry of `lines` is a line number, whether the comment is the line's only content, and
    the comment without its mark.
    """
    first, last, block = 0, -1, ""
    for number, only, text in lines:
        if only and number == last + 1:
            block += "\n" + text
        else:
            if block:
                yield first, block
            first, block = number, text
        last = number if only else -1
    if block:
        yield first, block


def python_comments(source: str) -> list[tuple[int, bool, str]]:
    """List a Python file's comments as `comment_blocks` takes them."""
    comments: list[tuple[int, bool, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("#!"):
            only = token.line[: token.start[1]].strip() == ""
            comments.append((token.start[0], only, token.string.lstrip("#").strip()))
    return comments


def joined(node: ast.JoinedStr) -> str:
    """Return an f-string's text with `{}` in place of its expressions."""
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
    )


def python_matches(source: str, *, is_product: bool = True) -> Iterator[Match]:
    """Yield the matches of a Python file.

    Outside the product, a string without a space is a value that tests use, and is not counted.
    """
    tree = ast.parse(source)
    docstrings: set[int] = set()
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner.update(id(part) for part in ast.walk(node) if part is not node)
        body = getattr(node, "body", None)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in body or []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(id(statement.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from matches_of_prose(joined(node), node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in inner:
                continue
            text = node.value
            if id(node) in docstrings:
                yield from fragment(text, node.lineno)
            if is_product or " " in text:
                yield from matches_of_prose(text, node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from matches_of_name(node.name, node.lineno)
        elif isinstance(node, ast.arg):
            yield from local(node.arg, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield from local(node.id, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from local(node.attr, node.lineno)
    for number, text in comment_blocks(python_comments(source)):
        if not re.match(r"(noqa|type:|pyright|pragma)", text):
            yield from fragment(text, number)
            yield from matches_of_prose(text, number)


def local(name: str, line: int) -> Iterator[Match]:
    """Yield the matches of a variable or parameter."""
    if LOCALS.fullmatch(name):
        yield Match(line, LOCALS_RULE, name)
    else:
        yield from matches_of_name(name, line)


def markdown_matches(source: str) -> Iterator[Match]:
    """Yield the matches of a Markdown file; inline code and link targets are not counted."""
    text = re.sub(r"\]\([^)\s]*\)", lambda target: "`" * len(target[0]), source)
    yield from matches_of_prose(text, 1)


def commented_matches(source: str) -> Iterator[Match]:
    """Yield the matches in `#` comments and in quoted or echoed text of configuration files."""
    comments: list[tuple[int, bool, str]] = []
    for number, line in enumerate(source.splitlines(), 1):
        comment = re.search(r"(?:^|\s)#+(?!!)\s*(.*)", line)
        rest = line[: comment.start()] if comment else line
        if comment:
            comments.append((number, rest.strip() == "", comment[1]))
        for quoted in re.finditer(
            r"\"[^\"]*\s[^\"]*\"|'[^']*\s[^']*'|(?<=description: )\S.*", rest
        ):
            yield from matches_of_prose(quoted[0], number)
    for number, text in comment_blocks(comments):
        yield from fragment(text, number)
        yield from matches_of_prose(text, number)


def json_matches(source: str) -> Iterator[Match]:
    """Yield the matches in the strings of a JSON file."""
    for number, line in enumerate(source.splitlines(), 1):
        for quoted in re.finditer(r'"(?:[^"\\]|\\.)*"', line):
            text = json.loads(quoted[0])
            if " " in text and not text.startswith("{"):
                yield from matches_of_prose(text, number)


def matches_of_file(path: str, source: str) -> list[Match]:
    """List the matches of one file, its name included, by line."""
    if path.endswith(".py"):
        unsorted = python_matches(source, is_product=not path.startswith(("tests/", "bench/")))
    elif path.endswith(".md"):
        unsorted = markdown_matches(source)
    elif path.endswith(".json"):
        unsorted = json_matches(source)
    elif re.search(r"\.(ya?ml|sh|toml|service|example|cff)$|Makefile|Dockerfile|\.ci/", path):
        unsorted = commented_matches(source)
    else:
        return []
    matches = sorted(unsorted, key=lambda match: match.line)
    return [*matches_of_name(Path(path).stem, 1), *matches]


def sources() -> Iterator[tuple[str, str]]:
    """Yield path and text of every file of the working tree."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.decode()
    for path in sorted(set(names.split("\0")) - {""}):
        if not EXCLUDED.fullmatch(path) and (ROOT / path).is_file():
            yield path, (ROOT / path).read_bytes().decode(errors="replace")


@cache
def count_words() -> dict[str, list[Match]]:
    """Map each file with at least one match to its matches."""
    matches = {path: matches_of_file(path, text) for path, text in sources()}
    return {path: lines for path, lines in matches.items() if lines}


def recorded() -> dict[str, int]:
    """Load the recorded counts: a line for each file, and `total` with the base revision's."""
    record: dict[str, int] = {}
    for line in RECORD.read_text().splitlines():
        if line and not line.startswith("#"):
            count, path = line.split(maxsplit=1)
            record[path] = min(int(count), record.get(path, int(count)))
    return record


HEADER = """\
# Matches of tests/words.py, per file. Counts only fall: python -m tests.words --lower
# A file that is not listed has none. `base` is the total of revision 8189ade, `bar` the limit.
"""


def save_record(record: dict[str, int]) -> None:
    """Save the recorded counts."""
    first = ["base", "bar"]
    paths = first + sorted(path for path in record if path not in first)
    RECORD.write_text(HEADER + "".join(f"{record[path]} {path}\n" for path in paths))


def lower(matches: dict[str, list[Match]]) -> None:
    """Lower every recorded count, and the bar, to the current counts; raise none."""
    record = recorded()
    lowered = {path: min(record[path], len(matches.get(path, []))) for path in record}
    total = sum(map(len, matches.values()))
    limits = {"base": record["base"], "bar": min(record["bar"], total)}
    save_record({path: n for path, n in lowered.items() if n} | limits)


def main(arguments: list[str] | None = None) -> int:
    """Print the matches, or lower the recorded counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.words", description=__doc__)
    parser.add_argument("paths", nargs="*", help="only files below these paths")
    parser.add_argument("--lower", action="store_true", help="lower the recorded counts")
    options = parser.parse_args(arguments)
    matches = count_words()
    if options.lower:
        lower(matches)
    for path, lines in matches.items():
        if not options.paths or any(Path(path).is_relative_to(p) for p in options.paths):
            for match in lines:
                print(f"{path}:{match.line}: {match.excerpt}   [{match.rule}]")
    print(f"{sum(map(len, matches.values()))} matches in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
