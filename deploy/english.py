"""Finds docstrings that do not say plainly what a thing is or does; `make lint` runs it.

    python -m deploy.english [FOLDER ...]

A docstring names the thing ("The limits of a client.") or says what it does ("Returns the mean.").
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("client", "server", "benchmarks", "deploy", "examples")
GENERATED = ("client/gradserve/v1/", "client/gradserve_protocol/v1/")
_CLAUSE = re.compile(r"(What|Whether|Of|Those|Whoever|How|Which|Where|When|Who)\b")
_REFERENCE = re.compile(r"See [`\w]")
_STIFF = re.compile(r"(?i)\b(anew|for good|whoever|those who|(is|are) told|to be had|passe[sd] on|all the same)\b")
_REPEATED = re.compile(r"Takes (the|its|an?|what)\b[^\n]*\Z")


def problem_of(docstring: str, *, is_constructor: bool = False) -> str | None:
    """Returns what is wrong with a docstring, or None."""
    if opening := _CLAUSE.match(docstring):
        return f"opens with {opening.group()!r}: name the thing, or say what it does"
    if _REFERENCE.match(docstring):
        return "refers to another docstring: leave it out if the method implements a declared one, or say what it does"
    if stiff := _STIFF.search(docstring):
        return f"has {stiff.group()!r}: name who does what, as one would say it"
    if is_constructor and _REPEATED.match(docstring):
        return "repeats the signature of the constructor: leave it out"
    return None


def problems(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the problem of each docstring that has one, those of attributes and constants too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            constructor = getattr(node, "name", "") == "__init__"
            for each in _docstrings(node):
                problem = problem_of(str(each.value), is_constructor=constructor)
                if problem is not None:
                    yield each.lineno, problem


def _docstrings(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) -> Iterator[ast.Constant]:
    before: list[ast.stmt | None] = [None, *node.body]
    for previous, statement in zip(before, node.body, strict=False):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            is_first = previous is None
            is_attribute = isinstance(previous, ast.Assign | ast.AnnAssign)
            if isinstance(statement.value.value, str) and (is_first or is_attribute):
                yield statement.value


def main() -> int:
    """Prints all problems; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description="Finds docstrings that do not say plainly what a thing is or does.")
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    listed = subprocess.run(
        ["git", "ls-files", *parser.parse_args().folders], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = 0
    for path in listed.stdout.splitlines():
        if path.endswith(".py") and not path.startswith(GENERATED) and (ROOT / path).exists():
            for line, problem in problems((ROOT / path).read_text()):
                sys.stdout.write(f"{path}:{line}: docstring {problem}\n")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
