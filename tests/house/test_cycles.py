import pytest

from tools.cycles import find_cycle, imports, module_name
from tools.source import Source


def package(**texts: str) -> list[Source]:
    """Files of a package ``p``; ``a_b`` stands for ``a/b.py``."""
    return [Source(f"src/p/{name.replace('_', '/')}.py", text) for name, text in texts.items()]


def test_two_files_that_import_each_other_are_a_cycle() -> None:
    cycle = find_cycle(package(a="from p import b\n", b="import p.a\n"))
    assert cycle is not None
    assert sorted(set(cycle)) == ["p.a", "p.b"]
    assert cycle[0] == cycle[-1]


def test_three_files_in_a_ring_are_a_cycle() -> None:
    ring = package(a="from p.b import x\n", b="from p.c import x\n", c="from p.a import x\n")
    assert len(find_cycle(ring) or []) == 4


def test_a_chain_is_no_cycle() -> None:
    assert find_cycle(package(a="from p.b import x\n", b="from p.c import x\n", c="import os\n")) is None


def test_an_import_inside_a_function_counts() -> None:
    hidden = package(a="def f():\n    from p.b import x\n", b="from p.a import f\n")
    assert find_cycle(hidden) is not None


@pytest.mark.parametrize("name", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_an_import_for_the_type_checker_does_not_count(name: str) -> None:
    typed = package(a=f"if {name}:\n    from p.b import X\n", b="from p.a import f\n")
    assert find_cycle(typed) is None


def test_the_other_branch_of_type_checking_counts() -> None:
    typed = package(a="if TYPE_CHECKING:\n    X = 1\nelse:\n    import p.b\n", b="import p.a\n")
    assert find_cycle(typed) is not None


def test_a_nested_import_of_the_other_branch_counts() -> None:
    nested = "if TYPE_CHECKING:\n    X = 1\nelse:\n    def f():\n        import p.b\n"
    assert find_cycle(package(a=nested, b="import p.a\n")) is not None


def test_a_submodule_that_imports_its_package_is_a_cycle() -> None:
    files = [
        Source("src/p/ir/__init__.py", "from p.ir.action import Action\n"),
        Source("src/p/ir/action.py", "from p.ir import Schedule\n"),
    ]
    assert find_cycle(files) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from . import action", ["p.ir.action"]),
        ("from .action import Action", ["p.ir.action"]),
        ("from ..errors import near", ["p.errors"]),
        ("from .. import errors", ["p.errors"]),
        ("from p.ir import action, nothing", ["p.ir.action"]),
        ("import p.errors, os", ["p.errors"]),
        ("import json", []),
    ],
)
def test_names_of_imported_modules(text: str, expected: list[str]) -> None:
    source = Source("src/p/ir/schedule.py", text + "\n")
    assert list(imports(source, {"p.ir.action", "p.errors"})) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("src/p/__init__.py", "p"), ("src/p/ir/__init__.py", "p.ir"), ("src/p/ir/action.py", "p.ir.action")],
)
def test_module_name_of_a_file(name: str, expected: str) -> None:
    assert module_name(Source(name, "")) == expected
