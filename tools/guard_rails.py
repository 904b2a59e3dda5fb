"""What no linter checks: sizes, reasons, arrows in a ring, and how much of the code is tests.

The limits are those of the codebases that engineers admire; CONTRIBUTING.md says what each is for.
Complexity, annotations at large and imports between rooms are ruff's, mypy's and import-linter's.

    python -m tools.guard_rails
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.cycles import find_cycle
from tools.lines import BUDGETS, room_code_lines
from tools.source import FunctionNode, Source, num_function_lines, read

MEDIAN_FUNCTION = 8
NINE_IN_TEN_FUNCTION = 30
LONG_FUNCTION = 60
LONG_SHARE = 0.02
FILE = 400
OVER_BUDGET = 1.25
TESTS_PER_CODE = 1.2
VAGUE_WORDS = {"info", "manager", "helper", "helpers", "util", "utils"}

_REASON = re.compile(r"#\s*long:\s*\w+")


@dataclass(frozen=True)
class House:
    """The package's files, and those of its tests; tests of the house's own tools are not among them."""

    src: list[Source]
    tests: list[Source]

    def functions(self) -> Iterator[tuple[Source, FunctionNode]]:
        """Every function of the package with its file."""
        return ((source, function) for source in self.src for function in source.functions())

    def function_lines(self) -> list[int]:
        """Lengths of all functions, sorted."""
        return sorted(num_function_lines(function) for _, function in self.functions())

    def code_lines(self) -> tuple[int, int]:
        """Lines of code in the package and in its tests."""
        code, tests = (sum(source.num_code_lines for source in group) for group in (self.src, self.tests))
        return code, tests


def read_house(root: Path) -> House:
    """Read ``src`` and ``tests`` under ``root``."""
    tests = [source for source in read(root, "tests") if not source.name.startswith("tests/house/")]
    return House(read(root, "src"), tests)


def median_function(house: House) -> Iterator[str]:
    """The median function has at most 8 lines."""
    lines = house.function_lines()
    if lines and (median := statistics.median(lines)) > MEDIAN_FUNCTION:
        yield f"the median function has {median:g} lines; at most {MEDIAN_FUNCTION}"


def nine_in_ten_functions(house: House) -> Iterator[str]:
    """Nine functions in ten have at most 30 lines."""
    if (length := percentile_90(house.function_lines())) > NINE_IN_TEN_FUNCTION:
        yield f"nine functions in ten have up to {length} lines; at most {NINE_IN_TEN_FUNCTION}"


def percentile_90(lines: list[int]) -> int:
    """Return the least length that nine in ten of the sorted ``lines`` do not exceed."""
    return lines[-(-len(lines) * 9 // 10) - 1] if lines else 0


def long_functions(house: House) -> Iterator[str]:
    """At most 2 % of functions exceed 60 lines, and each says why: ``# long: reason`` on its def."""
    functions = list(house.functions())
    long = [(src, function) for src, function in functions if num_function_lines(function) > LONG_FUNCTION]
    if len(long) > LONG_SHARE * len(functions):
        yield f"{len(long)} of {len(functions)} functions exceed {LONG_FUNCTION} lines; at most 2 %"
    for source, function in long:
        signature = source.lines[function.lineno - 1 : function.body[0].lineno - 1]
        if not any(_REASON.search(line) for line in signature):
            yield f"{_place(source, function)} {function.name} is long and gives no '# long: reason'"


def file_length(house: House) -> Iterator[str]:
    """A file has at most 400 lines."""
    for source in house.src:
        if source.num_lines > FILE:
            yield f"{source.name} has {source.num_lines} lines; at most {FILE}"


def room_budgets(house: House) -> Iterator[str]:
    """A room stays within 1.25 times its budget; `tools.lines` marks what is above the budget."""
    for room, num_lines in room_code_lines(house.src).items():
        budget = BUDGETS.get(room)
        if budget is not None and num_lines > OVER_BUDGET * budget:
            yield f"room {room} has {num_lines} lines of code; budget {budget}, at most {OVER_BUDGET * budget:g}"


def full_annotations(house: House) -> Iterator[str]:
    """Every parameter and every result is annotated."""
    for source, function in house.functions():
        missing = [argument.arg for argument in _arguments(function) if argument.annotation is None]
        missing += [] if function.returns else ["return"]
        if missing:
            yield f"{_place(source, function)} {function.name} does not annotate {', '.join(missing)}"


def _arguments(function: FunctionNode) -> list[ast.arg]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return [argument for argument in every if argument.arg not in ("self", "cls")]


def asserts(house: House) -> Iterator[str]:
    """`assert` is for ourselves: it carries a message, and no public function asserts on a parameter.

    Python drops asserts under ``-O``, so one that guards a user's value is no guard; a user gets an
    exception of the tree.
    """
    for source in house.src:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assert) and node.msg is None:
                yield f"{_place(source, node)} asserts without a message"
    for source, function in house.functions():
        if not function.name.startswith("_") or function.name == "__init__":
            yield from _asserts_on_parameters(source, function)


def _asserts_on_parameters(source: Source, function: FunctionNode) -> Iterator[str]:
    parameters = {argument.arg for argument in _arguments(function)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            used = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)} & parameters
            if used:
                given = ", ".join(sorted(used))
                yield f"{_place(source, node)} {function.name} asserts on {given}, which a caller gave"


def prints(house: House) -> Iterator[str]:
    """Only ``cli`` prints."""
    for source in house.src:
        for node in ast.walk(source.tree):
            if source.room != "cli" and isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                yield f"{_place(source, node)} prints outside cli"


def vague_names(house: House) -> Iterator[str]:
    """No module, class or function is an info, a manager, a helper or a util."""
    for source in house.src:
        if _words(Path(source.name).stem) & VAGUE_WORDS:
            yield f"{source.name} is named after no thing"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef | FunctionNode) and _words(node.name) & VAGUE_WORDS:
                yield f"{_place(source, node)} {node.name} is named after no thing"


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def import_cycles(house: House) -> Iterator[str]:
    """Modules import each other in no ring."""
    if cycle := find_cycle(house.src):
        yield f"import cycle: {' -> '.join(cycle)}"


def tests_per_code(house: House) -> Iterator[str]:
    """Tests have at least 1.2 lines for each line of code."""
    code, tests = house.code_lines()
    if tests < TESTS_PER_CODE * code:
        needed = f"at least {TESTS_PER_CODE} lines a line"
        yield f"{tests} lines of tests for {code} lines of code ({tests / code:.2f}); {needed}"


RAILS: tuple[Callable[[House], Iterator[str]], ...] = (
    median_function,
    nine_in_ten_functions,
    long_functions,
    file_length,
    room_budgets,
    full_annotations,
    asserts,
    prints,
    vague_names,
    import_cycles,
    tests_per_code,
)


def summary(house: House) -> str:
    """Return the figures that the rails look at, in one line."""
    lines = house.function_lines() or [0]
    code, tests = house.code_lines()
    return (
        f"{len(lines)} functions: median {statistics.median(lines):g} lines, nine in ten up to "
        f"{percentile_90(lines)}, longest {lines[-1]}; "
        f"{tests / max(code, 1):.2f} lines of tests for each line of code"
    )


def _place(source: Source, node: FunctionNode | ast.stmt | ast.expr) -> str:
    return f"{source.name}:{node.lineno}"


def main() -> int:
    """Print the figures and every violation; return 1 if there is one."""
    house = read_house(Path())
    violations = [(rail.__name__, text) for rail in RAILS for text in rail(house)]
    print(summary(house))
    for name, text in violations:
        print(f"{name}: {text}")
    print(f"guard rails: {len(RAILS)} checked, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
