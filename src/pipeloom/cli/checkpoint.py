"""`pipeloom checkpoint`: look at checkpoints, check them, and make one file of one.

Looking and checking load no torch and nothing else that could run what a file says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pipeloom.archive.manifest import MANIFEST, Manifest, read_manifest
from pipeloom.archive.steps import folder_of, step_of, steps_in
from pipeloom.archive.verify import faults_of
from pipeloom.cli.codes import FOUND_FAULTS, WRONG_VALUE
from pipeloom.cli.parser import Parser
from pipeloom.cli.terminal import print_error
from pipeloom.errors import CheckpointError, near

ACTIONS: Final = {
    "inspect": "print what a checkpoint holds: step, layout, files, names",
    "verify": "compare every file with the manifest, and name every fault",
    "merge": "write parameters and buffers into one safetensors file",
}
HELP: Final = "\n".join(
    [
        "usage: pipeloom checkpoint ACTION PATH [OPTIONS]",
        "",
        "Look at checkpoints, check them, and make one file of one.",
        "",
        "actions:",
        *(f"  {name:<8} {text}" for name, text in ACTIONS.items()),
        "",
        "PATH is a checkpoint, or a run: then its newest one, for `verify` all of them.",
        "`pipeloom checkpoint ACTION --help` prints an action's options.",
    ]
)


def run(argv: list[str]) -> int:
    """Run the command.

    Returns:
        0; 1 if `verify` found faults; 2 after a wrong value.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    actions: dict[str, Callable[[list[str]], int]] = {"inspect": _inspect, "verify": _verify, "merge": _merge}
    action = actions.get(argv[0]) if argv else None
    if action is None:
        what = f"{argv[0]!r} is no action" if argv else "no action was given"
        hint = near(argv[0], ACTIONS) if argv else None
        print_error(what, hint or f"the actions are {' '.join(ACTIONS)}; see pipeloom checkpoint --help")
        return WRONG_VALUE
    return action(argv[1:])


def _inspect(argv: list[str]) -> int:
    options = _parser("inspect", "PATH [--json]", has_json=True).parse(argv)
    folder = _checkpoints(options.path)[-1]
    manifest = read_manifest(folder)
    if options.json:
        _print_json({"path": str(folder), **_figures(manifest)})
    else:
        _print_lines([f"{folder}: step {manifest.step_index}", *_described(manifest)])
    return 0


def _verify(argv: list[str]) -> int:
    options = _parser("verify", "PATH [--json]", has_json=True).parse(argv)
    found = {str(folder): faults_of(folder) for folder in _checkpoints(options.path)}
    if options.json:
        _print_json({"checkpoints": [{"path": path, "faults": faults} for path, faults in found.items()]})
    for path, faults in found.items() if not options.json else ():
        _print_lines([f"{path}: {_count(len(faults), 'fault') if faults else 'good'}", *(f"  {f}" for f in faults)])
    return FOUND_FAULTS if any(found.values()) else 0


def _merge(argv: list[str]) -> int:
    parser = _parser("merge", "PATH OUT", has_json=False)
    parser.add_argument("out", metavar="OUT", help="the file to write; it must not exist yet")
    options = parser.parse(argv)
    folder = _checkpoints(options.path)[-1]
    from pipeloom.checkpoint import merge_model

    num_tensors = merge_model(folder, Path(options.out))
    print(f"{options.out}: {_count(num_tensors, 'tensor')} of {folder}")
    return 0


def _parser(action: str, usage: str, *, has_json: bool) -> Parser:
    made = Parser(f"checkpoint {action}", usage, f"{ACTIONS[action].capitalize()}.")
    made.add_argument("path", metavar="PATH", help="a checkpoint, or a run's folder")
    if has_json:
        made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _checkpoints(given: str) -> list[Path]:
    """Return the checkpoint, or those of a run, by their steps.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(given)
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return [path]
    for store in (path / "checkpoints", path):
        if steps := steps_in(store):
            return [folder_of(store, step_index) for step_index in steps]
    raise CheckpointError(
        f"there is no checkpoint in {path}", "give a folder like runs/NAME or runs/NAME/checkpoints/step-000200"
    )


def _figures(manifest: Manifest) -> dict[str, Any]:
    head: dict[str, Any] = asdict(manifest)
    contents: dict[str, Any] = head.pop("contents")
    sizes = {
        f"{kind}_bytes": sum(record.form.num_bytes for record in getattr(manifest.contents, kind).values())
        for kind in ("model", "optimizer")
    }
    return head | sizes | contents


def _described(manifest: Manifest) -> list[str]:
    contents, layout = manifest.contents, manifest.layout
    figures = _figures(manifest)
    cut = f"{_count(layout['num_stages'], 'stage')} on {_count(layout['num_ranks'], 'rank')}"
    lines = [
        f"saved from {cut}{', schedule ' + str(layout['schedule']) if layout['schedule'] else ''}",
        f"model: {_count(len(contents.model), 'tensor')}, {figures['model_bytes']} bytes",
        f"optimizer: {_count(len(contents.optimizer), 'tensor')}, {figures['optimizer_bytes']} bytes",
        "files:",
    ]
    lines += [f"  {record.num_bytes:>12}  {name}" for name, record in contents.files.items()]
    for stage, names in contents.stages.items():
        lines += [f"stage {stage}:", *(f"  {name}  {_form(manifest, name)}" for name in names)]
    return lines


def _form(manifest: Manifest, name: str) -> str:
    owner = manifest.contents.tied.get(name)
    record = manifest.contents.model.get(name)
    return f"is {owner}" if owner else str(record.form) if record else "no tensor"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines that hold names from a file: what would steer the terminal is shown as an escape."""
    for line in lines:
        print(line if line.isprintable() else ascii(line)[1:-1])


def _print_json(value: dict[str, Any]) -> None:
    import json

    json.dump(value, sys.stdout)
    print()
