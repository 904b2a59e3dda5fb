"""`pipeloom split`: print how a model of the user's would be cut, without making its parameters."""

from __future__ import annotations

from pipeloom.cli.parser import Parser, add_model
from pipeloom.errors import SplitError


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse(argv)
    from pipeloom.cli.loading import load, user_code
    from pipeloom.outline.description import split
    from pipeloom.splitting import needs_inputs

    loaded = load(options.model, options.inputs, is_bare=True)
    is_list = isinstance(loaded.model, list)
    if options.stages is None and options.cuts is None and not is_list:
        raise SplitError("the number of stages is missing", "give --stages N, or say where to cut with --cuts")
    args, kwargs = (
        loaded.required_inputs if needs_inputs(loaded.model, 2, options.cuts) else loaded.inputs or ((), None)
    )
    with user_code(options.model):
        outline = split(loaded.model, args, kwargs, num_stages=options.stages, cuts=options.cuts)
    print(outline.to_json() if options.json else outline)
    return 0


def parser() -> Parser:
    """The command's options."""
    made = Parser(
        "split",
        "MODULE:FACTORY --stages N [OPTIONS]",
        "Print how a model is cut: its units, stages, and what crosses between them. The parameters are never made.",
    )
    add_model(made)
    made.add_argument("--json", action="store_true", help="print everything as JSON")
    return made
