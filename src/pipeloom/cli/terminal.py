"""What the terminal can show, and what is written to it."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def print_error(message: str, hint: str | None = None) -> None:
    """One message on stderr: what is wrong, and on a line of its own what to do."""
    lines = [f"pipeloom: error: {message}", *([f"hint: {hint}"] if hint else [])]
    print("\n".join(lines), file=sys.stderr)


def columns_of(stream: TextIO) -> int | None:
    """The terminal's width; None where the stream is no terminal, so that nothing is cut in a file."""
    if not stream.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def is_coloured(stream: TextIO) -> bool:
    """Whether to colour: NO_COLOR forbids it, FORCE_COLOR demands it (both if not empty), else on terminals."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def write_anything(stream: TextIO) -> None:
    """Let a character that the stream's encoding lacks become ``?``, rather than an error."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def close_quietly(stream: TextIO) -> None:
    """After a closed pipe: what is still buffered goes nowhere, or Python complains when it exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return
