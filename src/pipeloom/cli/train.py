"""`pipeloom train`: words first, torch later, so that ``--help`` and a misspelt flag answer at once.

Each key of the configuration is a flag (``--train.steps``, as torchtitan writes them), made from its field.
argparse only sorts words: values stay text until `resolve` checks them together with the file's, so that a
wrong value fails with the same message wherever it was written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic.fields import FieldInfo

from pipeloom.cli.codes import FAILED, WRONG_VALUE
from pipeloom.cli.parser import count
from pipeloom.cli.terminal import print_error
from pipeloom.errors import ConfigError, near
from pipeloom.launch.rank import as_rank, is_launched
from pipeloom.launch.together import find_job, together
from pipeloom.train.config import SEE_HELP, Layer, read_config_file, resolve, sections, with_processes

DESCRIPTION = """\
Train a model through a pipeline. With nothing given: a byte-level GPT on the source text
of Python's standard library, in two stages. Defaults < --config FILE < flags."""
EPILOG = """\
--resume takes the saved run's configuration as its defaults, and continues bit-equal:
weights, optimizer, learning rate, data order, dropout.
--launch N trains in N processes, a stage in each; so does torchrun. The same run may go on
in any number of processes.
Exit codes: 0; 1 a process failed, after its cause; 2 a wrong value, after one message;
130 Ctrl-C and 143 SIGTERM, both after a checkpoint. A second signal ends at once."""


def run(argv: list[str]) -> int:
    """Train a model through a pipeline, in this process or in several.

    Returns:
        0, or 128 and the number of the signal that stopped it; with ``--launch`` also 1 or 2, after its message.

    Raises:
        PipeloomError: whatever the user can put right.
    """
    given = parse(argv)
    num_processes, max_restarts = given.pop("launch", None), given.pop("max_restarts", None)
    if num_processes is None and max_restarts is not None:
        raise ConfigError("--max_restarts was given without --launch, which starts what it would start again", SEE_HELP)
    if num_processes is None or is_launched():
        return as_rank(lambda: _train(given), WRONG_VALUE)
    if "RANK" in os.environ:
        raise ConfigError("--launch was given, but a launcher has started this process", "leave --launch out")
    _check(given, num_processes)
    return _launched(argv, num_processes, max_restarts or 0)


def _check(given: dict[str, Any], num_processes: int | None) -> list[Layer]:
    """Find what is wrong with the words themselves, before anything slow begins; return what they say."""
    keys = {name: value for name, value in given.items() if "." in name}
    file = [read_config_file(Path(given["config"]))] if "config" in given else []
    layers = [*file, Layer("command line", _by_section(keys))]
    stop_after = given.get("stop_after")
    if stop_after is not None and stop_after < 1:
        raise ConfigError(f"--stop_after was given {stop_after}, but the first step that can be last is 1")
    together = with_processes(layers, num_processes)
    if "resume" not in given:
        resolve(together)
    return layers


def _train(given: dict[str, Any]) -> int:
    job = find_job()
    layers = together(job, "the command line", lambda: _check(given, None))
    from rich.console import Console

    from pipeloom.train.job import train

    resume, stop_after = given.get("resume"), given.get("stop_after")
    number = train(layers, Console(file=sys.stdout), resume=resume, stop_after=stop_after, job=job)
    return 128 + number if number else 0


def _launched(argv: list[str], num_processes: int, max_restarts: int) -> int:
    from pipeloom.launch.agent import Launch

    command = [sys.executable, "-u", "-m", "pipeloom", "train", *argv]
    ended = Launch(command, num_processes, max_restarts, lambda text: print(text, file=sys.stderr)).run()
    if ended.code == FAILED:
        print(ended.message, file=sys.stderr)
    elif ended.message:
        print_error(ended.message, ended.hint)
    return ended.code


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Return the given flags by name, dotted ones as text.

    Raises:
        ConfigError: a flag that does not exist, or lacks its value.
        SystemExit: ``--help`` was given and answered.
    """
    parser = build_parser()
    given, unknown = parser.parse_known_args([_underscored(word) for word in argv])
    if unknown:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if flag is None:
            raise ConfigError(f"unexpected {' '.join(unknown)!r}: every value follows its --flag", SEE_HELP)
        raise ConfigError(f"there is no flag {flag!r}", near(flag, flag_names(parser)) or SEE_HELP)
    return vars(given)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: four flags of the command itself, then one for every key."""
    parser = _Parser(
        prog="pipeloom train",
        usage="pipeloom train [--config FILE] [--resume [PATH]] [--launch N] [--section.key VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=38, width=110),
    )
    parser.add_argument("--config", metavar="FILE", help="TOML with the sections and keys below")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="continue the newest run, or the run or checkpoint at PATH",
    )
    parser.add_argument("--launch", type=count, metavar="N", help="train in N processes, one for each stage")
    parser.add_argument(
        "--max_restarts",
        type=_restarts,
        metavar="K",
        help="with --launch: go on up to K times after a process failed (default: 0)",
    )
    parser.add_argument("--stop_after", type=int, metavar="STEP", help="save and stop at this step of the schedule")
    parser.add_argument("--model", dest="model.factory", metavar="MODULE:FUNCTION", help="short for --model.factory")
    for section, about, fields in sections():
        group = parser.add_argument_group(f"[{section}]", about)
        for key, field in fields.items():
            group.add_argument(f"--{section}.{key}", **_options(field))
    return parser


def flag_names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield every flag."""
    for action in parser._actions:
        yield from action.option_strings


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, SEE_HELP)


def _restarts(text: str) -> int:
    """A whole number; 0 is the default, and may be said."""
    return 0 if text == "0" else count(text)


def _options(field: FieldInfo) -> dict[str, Any]:
    """Return how argparse takes a key, and what ``--help`` says of it."""
    is_list, is_switch, choices = isinstance(field.default, tuple), field.annotation is bool, get_args(field.annotation)
    shown = "none" if field.default in ((), "") else str(field.default).lower() if is_switch else field.default
    kind = choices[0] if is_list else field.annotation
    return {
        "metavar": "|".join(choices) if choices and not is_list else getattr(kind, "__name__", "").upper(),
        "help": f"{field.description} (default: {shown})".replace("%", "%%"),
        **({"nargs": "*"} if is_list else {"nargs": "?", "const": "true"} if is_switch else {}),
    }


def _underscored(word: str) -> str:
    """Accept ``--train.batch-size``: hyphens in a flag's name are underscores."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word


def _by_section(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for dotted, value in given.items():
        section, key = dotted.split(".")
        values.setdefault(section, {})[key] = value
    return values
