"""Extract the sentences of all errors that the product raises, without running it.

`python -m tests.messages` (`make messages`) rewrites the snapshot `tests/messages.txt`;
`tests/test_messages.py` compares it with the code. Each entry has the error's class, its code, its
key, and the sentence with a placeholder for every value. Entries are grouped by package and sorted,
so that moving a function changes nothing. Sentences that pass through a factory (a function that
returns an error or does not return) are listed at the factory's calls, too.
"""

# ruff: noqa: T201

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "messages.txt"
PACKAGES = {
    "mopd": "mopd",
    "protocol": "protocol/mopd_protocol",
    "client": "client/mopd_client",
    "losses": "losses/mopd_losses",
    "server": "server/mopd_server",
    "trainer": "trainer/mopd_trainer",
}


@dataclass(frozen=True, order=True)
class Message:
    """One error sentence. `key` and `code` are empty where the error has none."""

    error: str
    code: str
    key: str
    template: str

    def __str__(self) -> str:
        facts = " ".join(fact for fact in (self.error, self.code, self.key) if fact)
        return f"{facts} | {self.template}"


def last_name(node: ast.expr) -> str:
    """Return the last name of an expression: `name` of `self.settings.name[0]`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
        return last_name(node.value)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and len(node.args) == 1:
            return last_name(node.args[0])
        return last_name(node.func)
    return "value"


def template(node: ast.expr) -> str | None:
    """Return a string expression with `{name}` in place of values; `None` if it has no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else f"{{{last_name(part.value) if isinstance(part, ast.FormattedValue) else ''}}}"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [template(side) or f"{{{last_name(side)}}}" for side in (node.left, node.right)]
        return "".join(sides)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return template(node.left)
    if isinstance(node, ast.IfExp):
        sides = [template(side) or f"{{{last_name(side)}}}" for side in (node.body, node.orelse)]
        return " / ".join(sides)
    return None


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the package and the syntax tree of every product module."""
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield package, ast.parse(path.read_text())


def error_codes(trees: list[ast.Module]) -> dict[str, str]:
    """Map every error class, the built-in ones included, to its code (empty if it has none)."""
    codes = {
        name: ""
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    codes["ArgumentTypeError"] = ""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in range(4):  # bases may be defined in modules that follow
        for node in classes:
            inherited = [codes[last_name(base)] for base in node.bases if last_name(base) in codes]
            if not inherited:
                continue
            own = [
                statement.value.value
                for statement in node.body
                if isinstance(statement, ast.Assign | ast.AnnAssign)
                and isinstance(statement.value, ast.Constant)
                and "code" in ast.unparse(statement).split("=")[0]
            ]
            codes[node.name] = str(own[0]) if own else next(filter(None, inherited), "")
    return codes


def factories(trees: list[ast.Module], codes: dict[str, str]) -> dict[str, str]:
    """Map functions that return an error, or never return, to the class of that error."""
    result: dict[str, str] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.returns:
                continue
            returned = ast.unparse(node.returns).strip("'\"").split(".")[-1]
            if returned in codes:
                result[node.name] = returned
            elif returned == "NoReturn":
                raised = [
                    last_name(call.func)
                    for call in ast.walk(node)
                    if isinstance(call, ast.Call) and last_name(call.func) in codes
                ]
                if raised:
                    result[node.name] = raised[0]
    return result


def assigned(scope: ast.AST, name: str) -> list[str]:
    """List the templates that are assigned to a name within a function."""
    return [
        text
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        and (text := template(node.value))
    ]


def returned(functions: dict[str, ast.AST], call: ast.Call) -> list[str]:
    """List the templates that the called function returns."""
    function = functions.get(last_name(call.func))
    if function is None:
        return []
    return [
        text
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value and (text := template(node.value))
    ]


def collect() -> dict[str, list[Message]]:
    """Map each package to its sorted messages."""
    parsed = list(modules())
    trees = [tree for _, tree in parsed]
    codes = error_codes(trees)
    raisers = {name: name for name in codes} | factories(trees, codes)
    messages: dict[str, set[Message]] = {package: set() for package in PACKAGES}
    for package, tree in parsed:
        functions = {
            node.name: node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        scopes = [tree, *functions.values()]
        scope_of = {id(node): scope for scope in scopes for node in ast.walk(scope)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or last_name(node.func) not in raisers:
                continue
            if not isinstance(node.func, ast.Name | ast.Attribute):
                continue
            error = raisers[last_name(node.func)]
            key = next((word.value for word in node.keywords if word.arg == "key"), None)
            arguments = [*node.args, *(word.value for word in node.keywords if word.arg != "key")]
            for argument in arguments:
                if isinstance(argument, ast.Name):
                    texts = assigned(scope_of[id(node)], argument.id)
                elif isinstance(argument, ast.Call):
                    texts = returned(functions, argument)
                else:
                    texts = [text for text in [template(argument)] if text]
                for text in texts:
                    if " " in text and len(re.findall(r"[A-Za-z]{2,}", text)) > 1:
                        sentence = " ".join(text.split())
                        shown = "" if key is None else f"key={template(key) or last_name(key)}"
                        messages[package].add(Message(error, codes[error], shown, sentence))
    return {package: sorted(entries) for package, entries in messages.items()}


def snapshot(messages: dict[str, list[Message]]) -> str:
    """Return the text of the snapshot."""
    lines = [
        "# All error sentences, by package: class, code and key | sentence.",
        "# Made by `make messages`; review it as text.",
    ]
    for package, entries in messages.items():
        lines += ["", f"## {package}", *map(str, entries)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the snapshot."""
    messages = collect()
    SNAPSHOT.write_text(snapshot(messages))
    print(f"{SNAPSHOT.relative_to(ROOT)}: {sum(map(len, messages.values()))} messages")


if __name__ == "__main__":
    main()
