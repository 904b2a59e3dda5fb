from pathlib import Path

import pytest

from tools import lines
from tools.source import Source

SOURCES = [
    Source("src/pipeloom/errors.py", "# a\n" + "x = 1\n" * 121),
    Source("src/pipeloom/ir/action.py", "x = 1\n\n# why\n"),
    Source("src/pipeloom/ir/schedule.py", "x = 1\n"),
    Source("src/pipeloom/__init__.py", "x = 1\n"),
]


def test_file_table_has_lines_and_code() -> None:
    assert lines.file_table(SOURCES)[2] == "     3     1  src/pipeloom/ir/action.py"


def test_rooms_add_up_the_code_of_their_files() -> None:
    assert lines.room_code_lines(SOURCES) == {"errors.py": 121, "ir": 2, "__init__.py": 1}


def test_a_room_over_its_budget_is_marked() -> None:
    assert lines.room_table(SOURCES)[1:] == [
        "     1       -  __init__.py",
        "   121     120  errors.py  over budget",
        "     2     900  ir",
    ]


def test_a_room_at_its_budget_is_not_marked() -> None:
    (row,) = lines.room_table([Source("src/pipeloom/pipeline.py", "x = 1\n" * 300)])[1:]
    assert row == "   300     300  pipeline.py"


def test_main_prints_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src" / "pipeloom").mkdir(parents=True)
    (tmp_path / "src" / "pipeloom" / "errors.py").write_text("x = 1\n\n")
    monkeypatch.chdir(tmp_path)
    lines.main()
    printed = capsys.readouterr().out
    assert "     2     1  src/pipeloom/errors.py\n\n  code  budget  room\n     1     120  errors.py\n" in printed
    assert printed.endswith("src: 2 lines, 1 of them code\ntests: 0 lines, 0 of them code\n")
