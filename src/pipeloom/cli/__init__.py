"""The command `pipeloom`: find the sub-command, run it, and turn what goes wrong into one message.

A framework that knows every command's options loads every command. Here a command is a module that is loaded
when it is called, so `pipeloom show` never pays for torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from pipeloom.cli.codes import CLOSED_PIPE, FAILED, INTERRUPTED, WRONG_VALUE
from pipeloom.cli.terminal import close_quietly, print_error, write_anything
from pipeloom.errors import PeerFailed, PipeloomError, near

COMMANDS = {
    "show": "draw and describe a schedule",
    "simulate": "predict when each action of a schedule runs, from what it costs",
    "compare": "simulate every schedule for the same ranks and costs",
    "convert": "write a schedule as the CSV of torch.distributed.pipelining",
    "split": "print how a model of yours is cut into stages",
    "check": "compare a step of a model of yours with a pipeline and without",
    "train": "train a model through a pipeline",
    "checkpoint": "look at checkpoints, check them, and make one file of one",
}

HELP = "\n".join(
    [
        "usage: pipeloom COMMAND [OPTIONS]",
        "",
        "Pipeline parallelism for any PyTorch model.",
        "",
        "commands:",
        *(f"  {name:<11} {text}" for name, text in COMMANDS.items()),
        "",
        "options:",
        "  -h, --help  print this and stop; `pipeloom COMMAND --help` prints a command's options",
        "  --version   print the version and stop",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pipeloom` with these arguments, by default those of the process.

    Returns:
        0; 1 after the failure of another rank, or if a check found something; 2 after a wrong value, with one message
        on stderr; 130 after Ctrl-C;
        141 if nobody reads the output.
    """
    write_anything(sys.stdout)
    try:
        code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except PipeloomError as error:
        print_error(error.message, error.hint)
        return FAILED if isinstance(error, PeerFailed) else WRONG_VALUE
    except BrokenPipeError:
        close_quietly(sys.stdout)
        return CLOSED_PIPE
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print_error("no command was given", f"the commands are {' '.join(COMMANDS)}; see pipeloom --help")
        return WRONG_VALUE
    command, *rest = argv
    if command in ("-h", "--help"):
        print(HELP)
        return 0
    if command == "--version":
        return _print_version()
    if command not in COMMANDS:
        hint = near(command, [*COMMANDS, "--help", "--version"]) or f"the commands are {' '.join(COMMANDS)}"
        print_error(f"{command!r} is no command", hint)
        return WRONG_VALUE
    run: Callable[[list[str]], int] = import_module(f"pipeloom.cli.{command}").run
    return run(rest)


def _print_version() -> int:
    from pipeloom import __version__

    print(f"pipeloom {__version__}")
    return 0
