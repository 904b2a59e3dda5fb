"""Each rail is fed a sample that breaks it, and one that just holds."""

from pathlib import Path

import pytest

from tools import guard_rails as rails
from tools.guard_rails import House
from tools.source import Source


def house(*texts: str, room: str = "ir/sample", tests: str = "") -> House:
    """A house of files in one room."""
    src = [Source(f"src/pipeloom/{room}{index or ''}.py", text) for index, text in enumerate(texts)]
    return House(src, [Source("tests/ir/test_sample.py", tests)])


def function(num_lines: int, name: str = "f", comment: str = "") -> str:
    """A function of ``num_lines`` lines."""
    return f"def {name}() -> None:{comment}\n" + "    pass\n" * (num_lines - 1)


def statements(num_lines: int) -> str:
    """A file of ``num_lines`` lines of code."""
    return "x = 1\n" * num_lines


def test_median_of_nine_lines_is_too_long() -> None:
    assert list(rails.median_function(house(function(2), function(9), function(9)))) == [
        "the median function has 9 lines; at most 8"
    ]
    assert not list(rails.median_function(house(function(8), function(8), function(50))))


def test_two_long_functions_in_ten_are_too_many() -> None:
    short = [function(3)] * 8
    assert list(rails.nine_in_ten_functions(house(*short, function(31), function(31)))) == [
        "nine functions in ten have up to 31 lines; at most 30"
    ]
    assert not list(rails.nine_in_ten_functions(house(*short, function(30), function(31))))


@pytest.mark.parametrize(("lines", "expected"), [([], 0), ([5], 5), (list(range(1, 11)), 9), (list(range(1, 21)), 18)])
def test_percentile(lines: list[int], expected: int) -> None:
    assert rails.percentile_90(lines) == expected


def test_a_long_function_needs_its_reason() -> None:
    short = [function(2)] * 49
    (violation,) = rails.long_functions(house(function(61, "huge"), *short))
    assert violation == "src/pipeloom/ir/sample.py:1 huge is long and gives no '# long: reason'"
    assert not list(rails.long_functions(house(function(60), *short)))


@pytest.mark.parametrize("comment", ["  # long: one table", "  #long: one table"])
def test_a_reason_on_the_def_line_is_enough(comment: str) -> None:
    assert not list(rails.long_functions(house(function(61, comment=comment), *[function(2)] * 49)))


@pytest.mark.parametrize(
    "text", ["# long: one table\n" + function(61), function(61).replace("pass", "pass  # long: x")]
)
def test_a_reason_above_or_below_the_def_is_none(text: str) -> None:
    assert list(rails.long_functions(house(text, *[function(2)] * 49)))


def test_a_reason_without_words_is_none() -> None:
    assert list(rails.long_functions(house(function(61, comment="  # long:"), *[function(2)] * 49)))


def test_three_long_functions_in_hundred_are_too_many() -> None:
    long = [function(61, comment="  # long: one table")]
    assert list(rails.long_functions(house(*long * 3, *[function(2)] * 97))) == [
        "3 of 100 functions exceed 60 lines; at most 2 %"
    ]
    assert not list(rails.long_functions(house(*long * 2, *[function(2)] * 98)))


def test_a_file_of_401_lines_is_too_long() -> None:
    assert list(rails.file_length(house(statements(401)))) == ["src/pipeloom/ir/sample.py has 401 lines; at most 400"]
    assert not list(rails.file_length(house(statements(400))))


def test_a_room_may_exceed_its_budget_by_a_quarter() -> None:
    assert list(rails.room_budgets(house(statements(400), statements(400), statements(326)))) == [
        "room ir has 1126 lines of code; budget 900, at most 1125"
    ]
    assert not list(rails.room_budgets(house(statements(400), statements(400), statements(325))))


@pytest.mark.parametrize(
    ("signature", "missing"),
    [
        ("def f(a, b: int) -> None", "a"),
        ("def f(a: int)", "return"),
        ("def f(*args, **kwargs: int) -> None", "args"),
        ("def f(a: int, *, key) -> None", "key"),
        ("def f(a, /)", "a, return"),
        ("async def f(a) -> None", "a"),
    ],
)
def test_a_missing_annotation_is_named(signature: str, missing: str) -> None:
    (violation,) = rails.full_annotations(house(f"{signature}: ...\n"))
    assert violation == f"src/pipeloom/ir/sample.py:1 f does not annotate {missing}"


def test_self_needs_no_annotation_but_init_a_result() -> None:
    assert not list(rails.full_annotations(house("class A:\n    def f(self) -> int: ...\n")))
    (violation,) = rails.full_annotations(house("class A:\n    def __init__(self): ...\n"))
    assert violation.endswith("__init__ does not annotate return")


def test_an_assert_without_message_is_refused() -> None:
    (violation,) = rails.asserts(house("def _f(a: int) -> None:\n    assert a\n"))
    assert violation == "src/pipeloom/ir/sample.py:2 asserts without a message"
    assert not list(rails.asserts(house("def _f(a: int) -> None:\n    assert a, 'planned by the pass'\n")))


@pytest.mark.parametrize("name", ["f", "__init__"])
def test_a_public_function_does_not_assert_on_what_it_was_given(name: str) -> None:
    text = f"def {name}(self, a: int) -> None:\n    b = 1\n    assert b, 'ours'\n    assert a > b, 'theirs'\n"
    (violation,) = rails.asserts(house(text))
    assert violation == f"src/pipeloom/ir/sample.py:4 {name} asserts on a, which a caller gave"


def test_only_the_command_line_prints() -> None:
    (violation,) = rails.prints(house("def f() -> None:\n    print(1)\n"))
    assert violation == "src/pipeloom/ir/sample.py:2 prints outside cli"
    assert not list(rails.prints(house("print(1)\n", room="cli/show")))
    assert not list(rails.prints(house("console.print(1)\n")))


@pytest.mark.parametrize("text", ["class BufferManager: ...\n", "def stage_info(): ...\n", "class IOHelper: ...\n"])
def test_a_vague_name_is_refused(text: str) -> None:
    (violation,) = rails.vague_names(house(text))
    assert violation.endswith("is named after no thing")


def test_a_vague_file_is_refused_and_a_longer_word_is_not() -> None:
    (violation,) = rails.vague_names(house("", room="runtime/utils"))
    assert violation == "src/pipeloom/runtime/utils.py is named after no thing"
    assert not list(rails.vague_names(house("def inform(): ...\nclass Managerial: ...\n")))


def test_an_import_cycle_is_drawn() -> None:
    files = [
        Source("src/pipeloom/a.py", "import pipeloom.b\n"),
        Source("src/pipeloom/b.py", "import pipeloom.a\n"),
    ]
    (violation,) = rails.import_cycles(House(files, []))
    assert violation.startswith("import cycle: pipeloom.")


def test_eleven_lines_of_tests_for_ten_of_code_are_too_few() -> None:
    assert list(rails.tests_per_code(house(statements(10), tests=statements(11)))) == [
        "11 lines of tests for 10 lines of code (1.10); at least 1.2 lines a line"
    ]
    assert not list(rails.tests_per_code(house(statements(10), tests=statements(12))))


def test_comments_in_tests_do_not_count_as_tests() -> None:
    padded = statements(11) + "# a comment\n" * 5 + "'a statement'\n"
    assert not list(rails.tests_per_code(house(statements(10), tests=padded)))
    assert list(rails.tests_per_code(house(statements(10), tests=padded.replace("'a statement'", "#"))))


def test_an_empty_house_breaks_no_rail() -> None:
    empty = House([], [])
    assert [text for rail in rails.RAILS for text in rail(empty)] == []
    assert "median 0 lines, nine in ten up to 0, longest 0; 0.00 lines of tests" in rails.summary(empty)


def test_summary_names_the_figures_that_the_rails_look_at() -> None:
    sample = house(function(2), function(5), tests=statements(14))
    expected = "2 functions: median 3.5 lines, nine in ten up to 5, longest 5; 2.00 lines of tests for each line"
    assert rails.summary(sample).startswith(expected)


@pytest.mark.parametrize(("text", "code"), [("print(1)\n", 1), ("", 0)])
def test_exit_code_follows_the_violations(
    text: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = tmp_path / "src" / "pipeloom"
    room.mkdir(parents=True)
    (room / "loud.py").write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_loud.py").write_text("x = 1\ny = 2\n")
    monkeypatch.chdir(tmp_path)
    assert rails.main() == code
    printed = capsys.readouterr().out
    assert ("prints: src/pipeloom/loud.py:1 prints outside cli" in printed) is bool(code)
    assert printed.endswith(f"guard rails: {len(rails.RAILS)} checked, {code} violations\n")


def test_tests_of_the_tools_do_not_pay_for_the_package(tmp_path: Path) -> None:
    for name in ("src/pipeloom/a.py", "tests/house/test_a.py", "tests/ir/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x = 1\n" * len(name))
    assert rails.read_house(tmp_path).code_lines() == (len("src/pipeloom/a.py"), len("tests/ir/test_a.py"))
