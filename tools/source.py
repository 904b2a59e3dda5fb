"""Python files as the guard rails see them: text, syntax tree, and lines that are code.

Counting lines with a regular expression takes the drawings in docstrings for code; the tokenizer does not.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Source:
    """One file: ``name`` is its path relative to the repository, with forward slashes."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.name)

    @cached_property
    def lines(self) -> list[str]:
        """Lines without their ends; line n is ``lines[n - 1]``."""
        return self.text.splitlines()

    @property
    def num_lines(self) -> int:
        """All lines."""
        return len(self.lines)

    @cached_property
    def num_code_lines(self) -> int:
        """Lines that are neither blank, comment nor docstring."""
        return len(_token_lines(self.text) - _docstring_lines(self.tree))

    @property
    def room(self) -> str:
        """The folder or file directly under src/pipeloom: ``ir``, ``errors.py``, ``pipeline.py``."""
        return self.name.removeprefix("src/pipeloom/").split("/")[0]

    def functions(self) -> Iterator[FunctionNode]:
        """Every function and method, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, FunctionNode))


def read(root: Path, *folders: str) -> list[Source]:
    """Read every Python file under ``folders`` of ``root``, sorted by name."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return [Source(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths]


def num_function_lines(function: FunctionNode) -> int:
    """Lines from ``def`` to the last statement, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _token_lines(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {line for token in tokens if token.type not in _NOT_CODE for line in range(token.start[0], token.end[0] + 1)}


def _docstring_lines(tree: ast.Module) -> set[int]:
    docstrings = (
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
    )
    return {line for node in docstrings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
