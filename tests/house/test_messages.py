"""`docs/messages.md` holds every message that processes and checkpoints raise, as the sources word it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("processes/*.py", "peers/*.py", "checkpoint/*.py", "archive/*.py", "ranks.py", "splitting/share.py")
CLASSES = {"ProcessError", "PeerFailed", "BatchError", "SplitError", "CheckpointError", "RuntimeError"}
NUM_FIXED = 8
"""Of a message with less text than this, the sources hold only a part."""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return "…"


def _plain(message: str) -> str:
    """Whitespace and values side by side do not matter."""
    return re.sub(r"[…\s]*…[…\s]*", "…", " ".join(message.split()))


def raised() -> Iterator[str]:
    """The messages of all errors that are made in `ROOMS`."""
    for path in sorted(found for room in ROOMS for found in (ROOT / "src/pipeloom").glob(room)):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CLASSES and node.args:
                message = _plain(_text(node.args[0]))
                if len(message.replace("…", "")) >= NUM_FIXED:
                    yield message


RAISED = sorted(set(raised()))
DOCUMENTED = {
    _plain(row) for row in re.findall(r"^\| `(.*?)` \|", (ROOT / "docs/messages.md").read_text("utf-8"), re.M)
}


@pytest.mark.parametrize("message", RAISED)
def test_every_message_is_on_the_page(message: str) -> None:
    assert message in DOCUMENTED


def test_the_page_holds_no_message_of_the_past() -> None:
    kinds = {'"exception"', '"lost"', '"ended"', '"stalled"'}
    assert DOCUMENTED - {*RAISED} == kinds
    assert len(RAISED) > 30
