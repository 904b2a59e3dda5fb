"""A drawn schedule should cost milliseconds: what the light rooms load, seen from a fresh interpreter."""

import subprocess
import sys

import pytest

HEAVY = {"numpy", "pydantic", "rich", "safetensors", "torch"}
LIGHT = [
    "pipeloom",
    "pipeloom.errors",
    "pipeloom.ir",
    "pipeloom.schedules",
    "pipeloom.passes",
    "pipeloom.cost",
    "pipeloom.sim",
    "pipeloom.archive.attempt",
    "pipeloom.archive.verify",
    "pipeloom.report",
    "pipeloom.cli",
]


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running ``code``."""
    code = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}}, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stderr.split())


@pytest.mark.parametrize("module", LIGHT)
def test_light_module_loads_nothing_heavy(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert "pipeloom" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "1f1b", "--stages", "4", "--micro-batches", "8"],
        ["show", "gpipe", "--stages", "2", "--micro-batches", "2", "--json"],
        ["simulate", "1f1b", "--stages", "4", "--micro-batches", "8"],
        ["--help"],
    ],
)
def test_light_command_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"from pipeloom.cli import main\ntry: main({arguments!r})\nexcept SystemExit as end: assert not end.code"
    assert not loaded_by(code) & HEAVY


def test_the_probe_sees_what_is_heavy() -> None:
    assert "rich" in loaded_by("import rich.console")
