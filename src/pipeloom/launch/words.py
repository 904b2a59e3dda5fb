"""What ranks leave for their launcher: files, because a rank that dies can leave nothing else, and nothing half.

An exit code tells the elastic agent one bit: failed, so start again. A wrong value, Ctrl-C and a full disk are ends on
purpose: starting again would find the same. So a rank under the launcher that ends on purpose exits with 0 and leaves
here what it means; and one that fails leaves the cause where torchrun looks for it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pipeloom.errors import PeerFailed

FOLDER: Final = "PIPELOOM_LAUNCH_FOLDER"
LAUNCHER: Final = "PIPELOOM_LAUNCHER_PID"
_STOPPED: Final = "stopped"
_ENDED: Final = "ended.json"
_CAUSE: Final = re.compile(r"rank \d+, ")  # as a rank says it that is ended by a timer, and can do no more


@dataclass(frozen=True)
class Ended:
    """An end on purpose.

    Attributes:
        code: the exit code that it means.
        message: what there is to say, or "".
        hint: what to do, or None.
    """

    code: int
    message: str = ""
    hint: str | None = None


@dataclass(frozen=True)
class Words:
    """The folder of one launch."""

    folder: Path

    def stop(self) -> None:
        """Let ranks that are only starting end at once."""
        (self.folder / _STOPPED).touch()

    @property
    def is_over(self) -> bool:
        """Whether a rank that starts now has nothing to do."""
        return (self.folder / _STOPPED).exists() or (self.folder / _ENDED).exists()

    def end(self, ended: Ended) -> None:
        """Leave word of an end on purpose; the first one's counts."""
        part = _written(self.folder / f".ended-{os.getpid()}", asdict(ended))
        with contextlib.suppress(FileExistsError):
            os.link(part, self.folder / _ENDED)
        part.unlink()

    @property
    def ended(self) -> Ended | None:
        """The end on purpose, if there was one."""
        found = _read(self.folder / _ENDED)
        return None if found is None else Ended(**found)

    def cause(self, attempt: int) -> str | None:
        """Why an attempt failed, the traceback first and the line that says it last; None if no rank could say.

        What the others say of one rank is more than it says itself: it ends in who it was, and where.
        """
        ranks = sorted(self.folder.glob(f"*/attempt_{attempt}/*"))
        found = [each for rank in ranks if (each := _read(rank / "error.json")) is not None]
        for each in sorted(found, key=lambda each: not each.get("is_of_peer", False)):
            return str(each["message"]["extraInfo"]["py_callstack"]).rstrip()
        lines = [line for rank in ranks for line in _lines(rank / "stderr.log") if _CAUSE.match(line)]
        return lines[-1] if lines else None


def record_failure(error: BaseException, environment: Mapping[str, str] = os.environ) -> None:
    """Leave the cause in the file that torchrun's agent gives each rank, in the form that torchrun prints."""
    path = environment.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    is_of_peer = isinstance(error, PeerFailed)
    text = str(error.cause) if isinstance(error, PeerFailed) else "".join(traceback.format_exception(error))
    inner = {"message": text.rstrip().splitlines()[-1], "extraInfo": _extra(text)}
    with contextlib.suppress(OSError):
        _written(Path(path), {"message": inner, "is_of_peer": is_of_peer})


def _extra(text: str) -> dict[str, str]:
    return {"py_callstack": text, "timestamp": str(int(time.time()))}


def _written(path: Path, value: Any) -> Path:
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)
    return path


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
