"""The command line of `pipeloom train`, made from the fields of the configuration.

A hand-kept parser drifts from the configuration that it fills.  Here each field is a flag
(``--train.steps``, as torchtitan writes them), and argparse only sorts words: values stay text until
`resolve` checks them together with the file's, so that both fail with the same message.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from pipeloom.errors import ConfigError, near
from pipeloom.train.config import SEE_HELP, Layer, TrainingConfig, dotted_keys

LATEST: Final = "latest"
DESCRIPTION = """\
Train a model through a pipeline. With nothing given: a byte-level GPT on the source text of Python's
standard library, in two stages. Defaults < --config FILE < flags."""
EPILOG = """\
Ctrl-C saves a checkpoint and leaves with code 130; wrong values leave with code 2.
--resume continues bit-equal: weights, optimizer, data order, dropout. It takes the saved run's
configuration as its defaults."""


@dataclass(frozen=True)
class Invocation:
    """What the command line asked for.

    Attributes:
        layer: the dotted flags.
        config_path: the TOML file, or None.
        resume: None, `LATEST`, or the path of a checkpoint or a run.
        stop_after: the step at which this process stops, or None for the schedule's end.
    """

    layer: Layer
    config_path: Path | None
    resume: str | None
    stop_after: int | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, SEE_HELP)


def parse_flags(argv: Sequence[str]) -> Invocation:
    """Sort the words of a command line.

    Raises:
        ConfigError: a flag that does not exist, or lacks its value.
        SystemExit: ``--help`` was given and answered.
    """
    parser = build_parser()
    given, unknown = parser.parse_known_args([_underscored(word) for word in argv])
    if unknown:
        raise _unknown_words(unknown, parser)
    words = vars(given)
    top = {name: words.pop(name) for name in ("config", "resume", "stop_after")}
    values: dict[str, dict[str, Any]] = {}
    for dotted, value in words.items():
        section, key = dotted.split(".")
        values.setdefault(section, {})[key] = value
    config_path = None if top["config"] is None else Path(top["config"])
    return Invocation(Layer("command line", values), config_path, top["resume"], top["stop_after"])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: four flags of the command itself, then one for every field."""
    parser = _Parser(
        "pipeloom train",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the keys below")
    parser.add_argument(
        "--resume", nargs="?", const=LATEST, metavar="PATH", help="continue a run: the newest, or the one at PATH"
    )
    parser.add_argument(
        "--stop_after", type=int, metavar="STEP", help="save and stop at this step of the whole schedule"
    )
    parser.add_argument(
        "--model", dest="model.factory", default=argparse.SUPPRESS, metavar="MODULE:FUNCTION",
        help="short for --model.factory",
    )  # fmt: skip
    groups = {
        section: parser.add_argument_group(f"[{section}]", field.annotation.__doc__)  # type: ignore[union-attr]
        for section, field in TrainingConfig.model_fields.items()
    }
    for section, key in dotted_keys():
        _add_field(groups[section], f"{section}.{key}", field_of(section, key))
    return parser


def field_of(section: str, key: str) -> FieldInfo:
    """Return the definition of one key."""
    fields: dict[str, FieldInfo] = TrainingConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    return fields[key]


def _add_field(group: argparse._ArgumentGroup, dotted: str, field: FieldInfo) -> None:
    shown = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    text = f"{field.description} (default: {'none' if shown == '' else shown})".replace("%", "%%")
    options: dict[str, Any] = {"dest": dotted, "default": argparse.SUPPRESS, "help": text}
    if field.annotation is bool:
        section, key = dotted.split(".")
        group.add_argument(f"--{dotted}", nargs="?", const="true", metavar="BOOL", **options)
        group.add_argument(f"--{section}.no_{key}", action="store_const", const="false", **options | {
            "help": argparse.SUPPRESS})  # fmt: skip
    elif get_origin(field.annotation) is tuple:
        group.add_argument(f"--{dotted}", nargs="*", metavar=kind_of(field), **options)
    else:
        group.add_argument(f"--{dotted}", metavar=kind_of(field), **options)


def kind_of(field: FieldInfo) -> str:
    """Return what a flag takes, as ``--help`` writes it: ``INT``, ``STR``, ``{off,bfloat16}``."""
    arguments = get_args(field.annotation)
    if get_origin(field.annotation) is tuple:
        return str(arguments[0].__name__).upper()
    if arguments:
        return "{" + ",".join(map(str, arguments)) + "}"
    return str(field.annotation.__name__).upper()  # type: ignore[union-attr]


def _underscored(word: str) -> str:
    """Accept ``--train.batch-size``: hyphens in a flag's name are underscores."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _unknown_words(words: Sequence[str], parser: argparse.ArgumentParser) -> ConfigError:
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if flag is None:
        return ConfigError(f"unexpected {' '.join(words)!r}: every value follows its --flag", SEE_HELP)
    known = [option for option in parser._option_string_actions if ".no_" not in option]
    return ConfigError(f"there is no flag {flag!r}", near(flag, known) or SEE_HELP)
