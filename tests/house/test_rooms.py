import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grimp import ImportGraph
from importlinter.configuration import configure

from tools.rooms import ExistingForbiddenContract, RoomsContract, parse_table

ROOT = Path(__file__).parents[2]
configure()

TABLE = ["errors:", "ir: errors", "sim: errors ir", "runtime: errors ir", "cli: *"]


def graph(*arrows: str) -> ImportGraph:
    """A graph of arrows ``importer > imported`` below ``pipeloom``."""
    result = ImportGraph()
    for arrow in arrows:
        importer, imported = (name if name == "torch" else f"pipeloom.{name}" for name in arrow.split(" > "))
        result.add_module("torch", is_squashed=True)
        result.add_module(importer)
        if imported != "torch":
            result.add_module(imported)
        result.add_import(importer=importer, imported=imported)
    return result


def faults(*arrows: str) -> list[str]:
    """What the contract of rooms says about a graph."""
    contract = RoomsContract("rooms", {}, {"package": "pipeloom", "rooms": TABLE})
    check = contract.check(graph(*arrows), verbose=False)
    assert check.kept == (not check.metadata["faults"])
    return list(check.metadata["faults"])


def test_an_arrow_outside_the_table_is_a_fault() -> None:
    assert faults("sim.loop > runtime.executor") == [
        "pipeloom.sim.loop imports pipeloom.runtime.executor; sim may import errors, ir"
    ]
    assert faults("errors > ir.action") == ["pipeloom.errors imports pipeloom.ir.action; errors may import nothing"]


@pytest.mark.parametrize(
    "arrow", ["sim.loop > ir.action", "sim.loop > sim.events", "cli.show > runtime.executor", "runtime.stage > torch"]
)
def test_an_arrow_inside_the_table_is_none(arrow: str) -> None:
    assert faults(arrow) == []


def test_a_room_without_a_line_is_a_fault() -> None:
    assert "pipeloom.attic has no line in the table of rooms" in faults("attic.box > ir.action")


def test_a_line_without_a_room_is_none() -> None:
    assert faults("ir.schedule > ir.action") == []


def test_the_facade_itself_may_import_any_room() -> None:
    result = graph("ir.schedule > errors")
    result.add_module("pipeloom")
    result.add_import(importer="pipeloom", imported="pipeloom.ir.schedule")
    contract = RoomsContract("rooms", {}, {"package": "pipeloom", "rooms": TABLE})
    assert contract.check(result, verbose=False).kept


def forbidden(*arrows: str) -> bool:
    """Whether torch stays out of ``sim`` and of ``planning``, which has no tenant."""
    options = {"source_modules": ["pipeloom.sim", "pipeloom.planning"], "forbidden_modules": ["torch"]}
    session = {"root_packages": ["pipeloom"], "include_external_packages": "True"}
    contract = ExistingForbiddenContract("light", session, options)
    return bool(contract.check(graph("sim.loop > ir.action", "sim > sim.loop", *arrows), verbose=False).kept)


def test_absent_rooms_do_not_break_the_light_contract() -> None:
    assert forbidden()


def test_torch_is_found_at_the_end_of_a_chain() -> None:
    assert not forbidden("ir.action > ir.deep", "ir.deep > torch")
    assert forbidden("runtime.stage > torch")


def test_the_shipped_table_catches_a_bad_arrow(tmp_path: Path) -> None:
    for name, text in {"ir": "", "sim": "import pipeloom.runtime\n", "runtime": "import torch\n"}.items():
        (tmp_path / "pipeloom" / name).mkdir(parents=True)
        (tmp_path / "pipeloom" / name / "__init__.py").write_text(text)
    (tmp_path / "pipeloom" / "__init__.py").touch()
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    command += ["--no-cache", "--no-logo", str(ROOT / ".importlinter")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "pipeloom.sim imports pipeloom.runtime; sim may import cost, errors, ir" in ran.stdout
    assert "Contracts: 0 kept, 2 broken." in ran.stdout


def test_no_room_of_the_shipped_table_is_above_itself() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    table = parse_table(config["importlinter:contract:rooms"]["rooms"].splitlines())
    seen: set[str] = set()
    for room, allowed in table.items():
        assert allowed <= {*seen, "*"}, room
        seen.add(room)
