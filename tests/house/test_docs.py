"""What the pages show is what happens: every Python block runs, every command prints what stands under it."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeloom import errors
from pipeloom.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Names below torch, attributes of its modules and tensors, and the one name that is overwritten.
_PRIVATE = re.compile(
    r"\b(torch|dist)(\.\w+)*(\._[a-zA-Z]| import _)"
    r"|\._(modules|parameters|buffers|\w+_hooks|version|cdata|schema)\b"
    r"|\.default_generators? = "
)
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Page and line, as in a traceback."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str, pages: list[Path] = PAGES) -> Iterator[Block]:
    """The fenced blocks of one language, page by page."""
    for page in pages:
        text = page.read_text("utf-8")
        for match in _FENCE.finditer(text):
            if match[1] == language:
                yield Block(page, text.count("\n", 0, match.start()) + 1, language, match[2])


def commands() -> Iterator[tuple[str, list[str], str]]:
    """Place, arguments and output of every shown command that is not ``train``, which takes minutes."""
    for block in blocks("console"):
        for shown in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, output = shown.partition("\n")
            program, *arguments = shlex.split(command, comments=True)
            if program == "pipeloom" and arguments[0] != "train":
                yield block.place, arguments, output.rstrip("\n")


SHOWN = list(commands())
WITH_PYTHON = sorted({block.page for block in blocks("python")})


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks("python", [page]):
        code = compile("\n" * block.line + block.text, str(page), "exec")
        exec(code, namespace)
    assert "pipeloom" in page.read_text("utf-8")


@pytest.mark.parametrize(("place", "arguments", "output"), SHOWN, ids=[place for place, *_ in SHOWN])
def test_shown_command_prints_what_stands_under_it(
    place: str, arguments: list[str], output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code = main(arguments)
    printed = capsys.readouterr()
    assert (printed.out + printed.err).replace("\r\n", "\n").rstrip("\n") == output, place
    assert code == (2 if "error: " in output else 0)


def test_every_kind_of_block_is_found() -> None:
    assert ROOT / "README.md" in WITH_PYTHON
    assert any(place.startswith("README.md") and arguments[0] == "show" for place, arguments, _ in SHOWN)
    assert any("error: " in output for _, _, output in SHOWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = _LINK.findall(page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_fence_says_what_it_holds(page: Path) -> None:
    fences = re.findall(r"^```(.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert {*fences[::2]} <= {"python", "console", "sh", "text", "py", "toml", "json", "ini"}
    assert {*fences[1::2]} <= {""}


def test_every_decision_is_listed_under_its_title() -> None:
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"^\| \[\d{4}\]\((.*?)\) \|", (folder / "README.md").read_text(), re.M)
    assert listed == sorted(path.name for path in folder.glob("0*.md"))
    assert all((folder / name).read_text().startswith(f"# {name[:4]}: ") for name in listed)


def test_training_page_lists_every_key_with_its_default() -> None:
    from pipeloom.train.config import TrainingConfig

    rows = re.findall(r"^\| `(\w+\.\w+)` \| `(.*?)` \| (.*) \|$", (ROOT / "docs/training.md").read_text(), re.M)
    expected = [
        (f"{section}.{key}", _shown(value.default), value.description)
        for section, table in TrainingConfig.model_fields.items()
        for key, value in table.annotation.model_fields.items()
    ]
    assert rows == expected


def _shown(default: object) -> str:
    return "none" if default in ("", ()) else str(default).lower() if isinstance(default, bool) else str(default)


def test_torch_page_names_every_file_that_uses_its_private_parts() -> None:
    page = (ROOT / "docs/torch-versions.md").read_text()
    users = {
        path.relative_to(ROOT / "src/pipeloom").as_posix()
        for path in (ROOT / "src").rglob("*.py")
        if _PRIVATE.search(path.read_text("utf-8"))
    }
    assert set(re.findall(r"`([\w/]+\.py)`", page)) == users


def test_error_page_draws_the_tree_of_the_module() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    (tree,) = re.findall(r"^```text\n(.*?)```$", page, re.M | re.S)
    documented = [line.strip() for line in (errors.__doc__ or "").splitlines()]
    assert [line.strip() for line in tree.splitlines()[1:]] == [line for line in documented if "── " in line]


def test_error_page_draws_every_class_below_its_base() -> None:
    depth_of = {"PipeloomError": 0}
    page = (ROOT / "docs/errors.md").read_text()
    depth_of |= {name: indent.count("   ") + 1 for indent, name in re.findall(r"^([│ ]*)[├└]── (\w+)", page, re.M)}
    tree = errors.PipeloomError
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, tree)]
    assert depth_of == {cls.__name__: len([base for base in cls.__mro__ if base in classes]) - 1 for cls in classes}
