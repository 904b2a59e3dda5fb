from pathlib import Path

import pytest

from tools.source import Source, num_function_lines, read

DRAWING = '''"""Module docstring

of three lines."""

# a comment


def draw(text: str) -> str:
    """One line."""
    picture = """
    kept: a string
    that is a value
    """

    return picture + text  # trailing comment


class Empty:
    """Only words."""
'''


def test_code_lines_leave_out_docstrings_comments_and_blanks() -> None:
    source = Source("src/pipeloom/ir/drawing.py", DRAWING)
    assert source.num_code_lines == 7
    assert source.num_lines == 19


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("# only\n\n# comments\n", 0),
        ("x = 1; y = 2\n", 1),
        ("x = (\n    1,\n\n    2,\n)\n", 4),
        ("def f() -> None: 'words'\n", 0),
        ("'words'\n'a second string is a statement'\n", 1),
    ],
)
def test_code_lines_of_odd_files(text: str, expected: int) -> None:
    assert Source("src/pipeloom/odd.py", text).num_code_lines == expected


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("src/pipeloom/ir/action.py", "ir"),
        ("src/pipeloom/runtime/transport/local.py", "runtime"),
        ("src/pipeloom/errors.py", "errors.py"),
        ("src/pipeloom/__init__.py", "__init__.py"),
    ],
)
def test_room_of_a_file(name: str, room: str) -> None:
    assert Source(name, "").room == room


def test_functions_finds_methods_and_nested_ones() -> None:
    text = "class A:\n    async def f(self):\n        def g(): ...\n"
    functions = {function.name: function for function in Source("a.py", text).functions()}
    assert sorted(functions) == ["f", "g"]
    assert num_function_lines(functions["f"]) == 2


def test_length_counts_from_def_not_from_decorator() -> None:
    (function,) = Source("a.py", "@cache\n@other\ndef f():\n    'words'\n    return 1\n").functions()
    assert num_function_lines(function) == 3


def test_read_sorts_by_name_relative_to_root(tmp_path: Path) -> None:
    for name in ("src/b.py", "src/a/c.py", "src/a/note.txt", "tests/t.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 'é'\n", "utf-8")
    assert [source.name for source in read(tmp_path, "src")] == ["src/a/c.py", "src/b.py"]
    assert read(tmp_path, "absent") == []
