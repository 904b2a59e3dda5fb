"""A rank under `launch`: it says how it ends once for all, and does not outlive its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pipeloom.errors import PeerFailed, PipeloomError, SaidElsewhere
from pipeloom.launch.words import FOLDER, LAUNCHER, Ended, Words, record_failure

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def is_launched() -> bool:
    """Whether `launch` has started this process."""
    return FOLDER in os.environ


def as_rank(run: Callable[[], int], wrong_value: int) -> int:
    """Run one rank; return its exit code.

    Under `launch` that is 0 for an end on purpose, whose real code and message are left for the launcher, and 1 for a
    failure, whose cause is left too, and not printed: the launcher says it once. Elsewhere ``run`` runs as it is, but
    leaves the cause of a failure for torchrun.

    Args:
        run: does the work and returns an exit code.
        wrong_value: the exit code of what the user can put right.
    """
    folder = os.environ.pop(FOLDER, None)
    try:
        if folder is None:
            return run()
        words = Words(Path(folder))
        _end_with_launcher(int(os.environ.pop(LAUNCHER)))
        if words.is_over:
            words.end(Ended(0))
            return 0
        return _left(words, run, wrong_value)
    except SaidElsewhere:
        return wrong_value if folder is None else 0
    except Exception as error:
        if isinstance(error, PeerFailed) or not isinstance(error, PipeloomError):
            record_failure(error)
        if folder is None:
            raise
        return 1


def _left(words: Words, run: Callable[[], int], wrong_value: int) -> int:
    try:
        if code := run():
            words.end(Ended(code))
    except (PeerFailed, SaidElsewhere):
        raise
    except KeyboardInterrupt:
        words.end(Ended(128 + signal.SIGINT))
    except BrokenPipeError:  # nobody reads the output any more
        words.end(Ended(128 + signal.SIGPIPE))
    except PipeloomError as error:
        words.end(Ended(wrong_value, error.message, error.hint))
    return 0


def _end_with_launcher(launcher: int) -> None:
    """Let the system send SIGHUP when the launcher dies, however it does: Linux only."""
    for number in (signal.SIGINT, signal.SIGHUP):  # before there is anything to save: end, and without a traceback
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
        if os.getppid() != launcher:  # it has died before
            raise SystemExit(1)
