"""The table of rooms stands in ARCHITECTURE.md, .importlinter and tools/lines.py: it is one table."""

import configparser
import re
from pathlib import Path

import pytest

import pipeloom.runtime
from tools.lines import BUDGETS
from tools.rooms import parse_table
from tools.source import read

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| `(\w+)` \| .* \| ([a-z ]*) ?\| (\d+) \|$", re.MULTILINE)

PAGE = {room: (allowed, int(budget)) for room, allowed, budget in _ROW.findall((ROOT / "ARCHITECTURE.md").read_text())}


def arrows() -> dict[str, set[str]]:
    """The table of `.importlinter`."""
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    return parse_table(config["importlinter:contract:rooms"]["rooms"].splitlines())


def test_page_and_contract_name_the_same_rooms() -> None:
    assert set(PAGE) == set(arrows()) - {"__main__"}


@pytest.mark.parametrize("room", PAGE)
def test_page_and_contract_allow_the_same_arrows(room: str) -> None:
    allowed, _ = PAGE[room]
    assert set(allowed.replace("everything", "*").split()) == arrows()[room]


@pytest.mark.parametrize("room", PAGE)
def test_page_and_rail_have_the_same_budget(room: str) -> None:
    assert PAGE[room][1] == BUDGETS.get(room, BUDGETS.get(f"{room}.py"))


def test_a_room_without_tenant_is_said_to_have_none() -> None:
    tenants = {source.room.removesuffix(".py") for source in read(ROOT, "src")}
    page = (ROOT / "ARCHITECTURE.md").read_text()
    empty = {room for room in PAGE if f"| `{room}` | (no tenant yet)" in page}
    assert empty == set(PAGE) - tenants


def test_the_two_files_of_a_new_schedule_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`(src/pipeloom/schedules/[\w.]+)`", page)
    assert (ROOT / "src/pipeloom/schedules/registry.py").exists()
    assert sorted(named) == ["src/pipeloom/schedules/NAME.py", "src/pipeloom/schedules/registry.py"]


def test_what_to_read_first_is_there() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where to begin reading")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", section)
    assert len(named) >= 9
    assert [name for name in named if not (ROOT / "src/pipeloom" / name).exists()] == []


def test_the_map_of_the_runtime_names_every_file() -> None:
    words = set(re.findall(r"\w+", (pipeloom.runtime.__doc__ or "").partition("::")[2]))
    files = {path.stem for path in (ROOT / "src/pipeloom/runtime").iterdir() if not path.name.startswith("_")}
    assert files - words == set()
