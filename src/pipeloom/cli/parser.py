"""Options in argparse, which loads in milliseconds, with messages as the rest of Pipeloom writes them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NoReturn

from pipeloom.cli.codes import WRONG_VALUE
from pipeloom.cli.terminal import print_error
from pipeloom.errors import near

_HELP_WIDTH = 100


class Parser(argparse.ArgumentParser):
    """A sub-command's parser: one message for a wrong value, near names for an unknown option."""

    def __init__(self, command: str, usage: str, description: str) -> None:
        super().__init__(
            prog=f"pipeloom {command}",
            usage=f"pipeloom {command} {usage}",
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; ends the process with exit code 2 at a wrong value."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            self.refuse(unknown[0])
        return options

    def refuse(self, unknown: str) -> NoReturn:
        """End with a message on an argument that nobody takes."""
        given = unknown.partition("=")[0]
        what = f"{given} is no option" if given.startswith("-") else f"{given!r} is one argument too many"
        self.stop(what, near(given, self.long_options()))

    def long_options(self) -> Iterable[str]:
        """The options that begin with two dashes."""
        return [option for option in self._option_string_actions if option.startswith("--")]

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one message, without the usage lines of argparse."""
        self.stop(message, None)

    def stop(self, message: str, hint: str | None) -> NoReturn:
        """End with exit code 2 and one message."""
        print_error(message, hint or f"see {self.prog} --help")
        raise SystemExit(WRONG_VALUE)


def add_model(parser: Parser, more: str = "") -> None:
    """The options of a command that cuts a model of the user's; ``more`` is said of the model."""
    parser.add_argument(
        "model",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns an nn.Module, (module, inputs) or (module, args, kwargs); or "
        f"a module{more}",
    )
    parser.add_argument("--stages", metavar="N", type=count, help="parts that the model is cut into")
    parser.add_argument(
        "--cuts",
        metavar="A,B",
        type=places,
        help="where stages begin: names of modules, or indices of calls of units; or as many sizes as stages; or auto",
    )
    parser.add_argument(
        "--inputs",
        metavar="MODULE:FUNCTION",
        help="a function that returns a dict of keyword arguments, a tuple of positional ones, or (args, kwargs)",
    )


class _Formatter(argparse.HelpFormatter):
    """The same help on every Python and in every terminal: argparse's own changes with both."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_HELP_WIDTH, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = "" if action.nargs == 0 else f" {action.metavar}"
        return ", ".join(action.option_strings) + value if action.option_strings else str(action.metavar)


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} was given; a whole number is needed") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} was given; at least 1 is needed")
    return number


def number(text: str) -> float:
    """A number, for argparse; whether it may be negative is for `pipeloom.cost` to say."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} was given; a number is needed") from None


def per_stage(text: str) -> float | list[float]:
    """A number for all stages, or one per stage with commas between, for argparse."""
    return [number(part) for part in text.split(",")] if "," in text else number(text)


def places(text: str) -> list[int] | list[str] | None:
    """Whole numbers, or names, with commas between, for argparse; "auto" is as none."""
    if text == "auto":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} was given; numbers or names are needed, with commas between")
    if all(part.isdecimal() for part in parts):
        return [int(part) for part in parts]
    return parts
