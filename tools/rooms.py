"""Contracts for import-linter that hold before every room has a tenant.

import-linter's own contracts fail on a module that does not exist yet, and they say what is forbidden; the
design says what is allowed. ``.importlinter`` holds the design's table as it stands and these two classes
read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.domain.imports import ModuleExpression


class RoomsContract(Contract):
    """``rooms`` holds lines ``room: room room …``: what may be imported; ``*`` allows everything.

    A room with modules but without a line breaks the contract; a line without a room does not.
    """

    package = fields.StringField()
    rooms = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Compare every direct import between two rooms with the table."""
        # The class attributes are declarations; import-linter puts the parsed values in their place.
        package, allowed = cast(str, self.package), parse_table(cast(list[str], self.rooms))
        faults = [
            *_rooms_without_line(graph, package, allowed),
            *_imports_without_arrow(graph, package, allowed),
        ]
        return ContractCheck(kept=not faults, metadata={"faults": faults})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print one line for each fault."""
        for fault in check.metadata["faults"]:
            output.print_error(fault)


class ExistingForbiddenContract(ForbiddenContract):
    """import-linter's forbidden contract, for those of its source modules that exist."""

    type_name = "forbidden_if_present"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Leave out rooms without tenants, then check as usual."""
        declared = cast(set[ModuleExpression], self.source_modules)
        present = {module for module in declared if str(module) in graph.modules}
        setattr(self, "source_modules", present)  # noqa: B010  # declared as a field, holds a set
        return super().check(graph, verbose)


def parse_table(lines: list[str]) -> dict[str, set[str]]:
    """Parse ``room: room room`` lines."""
    pairs = (line.partition(":") for line in lines if line.strip())
    return {room.strip(): set(targets.split()) for room, _, targets in pairs}


def _room(module: str, package: str) -> str | None:
    path = module.removeprefix(f"{package}.")
    return None if path == module else path.split(".")[0]


def _rooms_without_line(graph: ImportGraph, package: str, allowed: Mapping[str, set[str]]) -> list[str]:
    rooms = {room for module in graph.modules if (room := _room(module, package))}
    return [f"{package}.{room} has no line in the table of rooms" for room in sorted(rooms - set(allowed))]


def _imports_without_arrow(graph: ImportGraph, package: str, allowed: Mapping[str, set[str]]) -> list[str]:
    faults = []
    for importer in sorted(graph.modules):
        source = _room(importer, package)
        for imported in sorted(graph.find_modules_directly_imported_by(importer)):
            target = _room(imported, package)
            if source and target and source != target and not {target, "*"} & allowed.get(source, {"*"}):
                faults.append(f"{importer} imports {imported}; {source} may import {_listed(allowed[source])}")
    return faults


def _listed(rooms: set[str]) -> str:
    return ", ".join(sorted(rooms)) or "nothing"
