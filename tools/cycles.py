"""Import cycles between modules of one package.

An import inside a function hides a cycle from Python but not from the reader, so it counts; one under
``if TYPE_CHECKING:`` never runs, so it does not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

from tools.source import Source


def find_cycle(sources: Iterable[Source]) -> list[str] | None:
    """Return the modules of one cycle, the first one repeated at the end, or None."""
    by_module = {module_name(source): source for source in sources}
    graph = {module: set(imports(source, set(by_module))) - {module} for module, source in by_module.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(module) for module in error.args[1]]
    return None


def module_name(source: Source) -> str:
    """``src/pipeloom/ir/__init__.py`` is ``pipeloom.ir``."""
    parts = PurePosixPath(source.name).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: Source, known: set[str]) -> Iterator[str]:
    """Yield the modules among ``known`` that a file imports, at any depth of nesting."""
    for node in _running_nodes(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(node, source, known)


def _imported_from(node: ast.ImportFrom, source: Source, known: set[str]) -> Iterator[str]:
    base = _absolute_base(node, source)
    for alias in node.names:
        submodule = f"{base}.{alias.name}"
        if submodule in known:
            yield submodule
        elif base in known:
            yield base


def _absolute_base(node: ast.ImportFrom, source: Source) -> str:
    if not node.level:
        return node.module or ""
    package = PurePosixPath(source.name).parts[1:-1]
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield statement
                yield from _running_nodes(statement)
            continue
        yield child
        yield from _running_nodes(child)
