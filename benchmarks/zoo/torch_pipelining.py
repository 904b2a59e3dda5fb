"""What torch's own `pipeline()` makes of the models of the zoo.

    python -m benchmarks.zoo.torch_pipelining [--stages 2 3 4] [--models NAME ...] [--json]

Needs the zoo's environment (`make test-zoo` makes it: .venv-zoo/bin/python) for all thirty; models whose library is
missing are left out. `torch.distributed.pipelining.pipeline` traces a model and cuts it before sub-modules; each stage
then trains one batch of four micro-batches under its `ScheduleGPipe`, a process each over gloo. Loss and gradients are
held against the plain model's.

torch is used as well as its documentation allows: cuts are members of the model's own block lists that balance the
parameters, dropout is off on both sides (a trace draws in another order), and where a loss inside the model
(``labels=``) does not train, it is asked for again with the loss outside, on those outputs that the last stage makes.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import json
import multiprocessing
import operator
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from torch.utils._pytree import tree_leaves

from tests.zoo import models

LIMIT_S = 180.0
# torch adds up in another order in places; more than this is another gradient.
CLOSE = 1e-5
NO_TRACE = "It seems that we cannot capture your model"
FORK = multiprocessing.get_context("fork")

Inputs = dict[str, Any]


class StageFailed(Exception):
    """What a stage's process died of."""


def without_dropout(model: nn.Module) -> nn.Module:
    """Every dropout, as a module or as a number that a forward reads, becomes 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in vars(module).items():
            if isinstance(value, float) and ("drop" in key):
                setattr(module, key, 0.0)
    return model


def outside(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs without those that make the model compute its loss."""
    kept = {key: value for key, value in inputs.items() if key not in models.LOSS_INPUTS}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "labels" in inputs:
        kept["decoder_input_ids"] = inputs["labels"]
    return kept


def called_modules(model: nn.Module, inputs: Inputs) -> dict[str, int]:
    """Modules that one forward calls once, in order → the parameters of what was called before."""
    order: list[str] = []
    names = {module: name for name, module in model.named_modules() if name}
    hooks = [module.register_forward_pre_hook(lambda module, _: order.append(names[module])) for module in names]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    before, seen, starts = 0, set[int](), {}
    for name in order:
        starts[name] = before
        for parameter in model.get_submodule(name).parameters(recurse=False):
            before += 0 if id(parameter) in seen else parameter.numel()
            seen.add(id(parameter))
    return {name: start for name, start in starts.items() if Counter(order)[name] == 1}


def split_points(model: nn.Module, inputs: Inputs, num_stages: int) -> list[str]:
    """The members of block lists before which cuts make the stages most equal; any modules if they are too few."""
    starts = {name: start for name, start in called_modules(model, inputs).items() if start}
    blocks = [name for name in starts if name.rpartition(".")[2].isdigit()]
    outermost = [name for name in blocks if sum(part.isdigit() for part in name.split(".")) == 1]
    total = sum(parameter.numel() for parameter in model.parameters())

    def unevenness(names: tuple[str, ...]) -> int:
        places = [0, *(starts[name] for name in names), total]
        return sum((end - start) ** 2 for start, end in itertools.pairwise(places))

    for candidates in (outermost, blocks, list(starts)):
        if len(candidates) >= num_stages - 1:
            return list(min(itertools.combinations(candidates, num_stages - 1), key=unevenness))
    raise RuntimeError(f"no {num_stages - 1} modules to cut before")


def last_outputs(pipe: Pipe) -> dict[int, int]:
    """Which of the model's outputs the last stage makes: position in the model's → position in the stage's."""
    last = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"][-1]
    output = next(node for node in pipe.split_gm.graph.nodes if node.op == "output")
    found = {}
    for position, node in enumerate(tree_leaves(output.args)):
        if node is last:
            found[position] = 0
        elif getattr(node, "target", None) is operator.getitem and node.args[0] is last:
            found[position] = node.args[1]
    return found


def loss_on(positions: list[int], has_own_loss: bool) -> Callable[..., Tensor]:
    """The loss of a flat list of outputs: the first of them, or `models.mean_squares` of those at ``positions``."""

    def loss(output: Any, _: Tensor | None = None) -> Tensor:
        flat = tree_leaves(output)
        return flat[0] if has_own_loss else models.mean_squares([flat[each] for each in positions])

    return loss


def root_inputs(pipe: Pipe, stage: int, inputs: Inputs) -> Inputs:
    """Of the model's inputs those that a stage needs; a first stage that has kept the model's signature wants all."""
    node = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"][stage]
    needed = {each.name for each in node.all_input_nodes if each.op == "placeholder"}
    taken = inspect.signature(pipe.get_stage_module(stage).forward).parameters
    is_whole = stage == 0 and len(taken) == len(inputs)
    return {key: value for key, value in inputs.items() if is_whole or key in needed}


def run_stage(pipe: Pipe, stage: int, inputs: Inputs, loss: Callable[..., Tensor], folder: Path) -> None:
    """One stage in a process of its own: a step, then its gradients in a file."""
    try:
        store = dist.FileStore(str(folder / "store"), pipe.num_stages)
        dist.init_process_group("gloo", rank=stage, world_size=pipe.num_stages, store=store)
        made = pipe.build_stage(stage, torch.device("cpu"))
        schedule = ScheduleGPipe(made, models.NUM_MICROBATCHES, loss_fn=loss)
        losses: list[Tensor] = []
        rows = next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor))
        last = {"target": torch.zeros(rows), "losses": losses} if stage == pipe.num_stages - 1 else {}
        schedule.step(**root_inputs(pipe, stage, inputs), **last, return_outputs=False)
        grads = {name: parameter.grad for name, parameter in made.submod.named_parameters(remove_duplicate=False)}
        grads = {name: grad for name, grad in grads.items() if grad is not None}
        torch.save({"grads": grads, "losses": losses}, folder / f"{stage}.pt")
        dist.barrier()
    except BaseException as error:
        folder.joinpath(f"{stage}.error").write_text(first_line(error))
        raise SystemExit(1) from None


def first_line(error: BaseException) -> str:
    """What went wrong at the bottom of it, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, StageFailed):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def run_stages(pipe: Pipe, inputs: Inputs, loss: Callable[..., Tensor], folder: Path) -> list[dict[str, Any]]:
    """All stages at once.

    Raises:
        StageFailed: one of them failed.
    """
    ranks = [FORK.Process(target=run_stage, args=(pipe, each, inputs, loss, folder)) for each in range(pipe.num_stages)]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        time.sleep(0.02)
    for rank in ranks:
        rank.kill()
        rank.join()
    # The others' connections break when one fails: its own reason is the one that is not gloo's.
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    if errors:
        raise StageFailed(min(errors, key=lambda text: "gloo" in text.lower() or "Connection" in text))
    return [torch.load(folder / f"{stage}.pt") for stage in range(pipe.num_stages)]


def plain(model: nn.Module, parts: list[Inputs], loss: Callable[..., Tensor]) -> Tensor:
    """The mean loss of the micro-batches on the whole model, whose gradients they add up in."""
    losses = [loss(model(**inputs)) for inputs in parts]
    for each in losses:
        (each / len(parts)).backward()
    return torch.stack(losses).detach().mean()


def differences(stages: list[dict[str, Any]], reference: nn.Module) -> Iterator[tuple[float, str]]:
    """How far each gradient is off, relative to its norm; of a tied parameter that of the stage that is off furthest.

    A gradient that no stage has is off by 1.
    """
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    for parameter, names in aliases.items():
        found = [stage["grads"][name] for stage in stages for name in names if name in stage["grads"]]
        expected = parameter.grad
        if expected is not None and expected.any():
            off = [float((each - expected).norm() / expected.norm()) for each in found]
            yield max(off, default=1.0), " = ".join(names)


def step(name: str, num_stages: int, is_inside: bool) -> dict[str, Any]:
    """Trace, cut, train and compare; the first thing that fails ends it."""
    model = without_dropout(models.build(name))
    parts, whole = models.microbatches(name), models.batch(name)
    if not is_inside:
        parts, whole = [outside(model, part) for part in parts], outside(model, whole)
    reference = copy.deepcopy(model)
    row: dict[str, Any] = {"traces": False, "splits": False, "trains": False}
    cuts = split_points(copy.deepcopy(model), parts[0], num_stages)
    try:
        began_s = time.perf_counter()
        pipe = pipeline(model, (), parts[0], split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING))
        row |= {"traces": True, "split_s": time.perf_counter() - began_s, "cuts": cuts}
        row |= {"splits": pipe.num_stages == num_stages, "num_stages": pipe.num_stages}
        made = last_outputs(pipe)
        row["outputs_of_last_stage"] = len(made)
        with tempfile.TemporaryDirectory() as folder:
            stages = run_stages(pipe, whole, loss_on(list(made.values()), is_inside), Path(folder))
        row["trains"] = True
    except Exception as error:
        row["traces"] |= not str(error).startswith(NO_TRACE)
        return row | {"error": first_line(error)}
    expected = plain(reference, parts, loss_on(list(made), is_inside))
    found = torch.stack(stages[-1]["losses"]).mean()
    worst, where = max(differences(stages, reference))
    return row | {
        "loss_off": float((found - expected).abs() / expected.abs()),
        "worst_gradient_off": worst,
        "worst_gradient": where,
    }


def run_step(name: str, num_stages: int, is_inside: bool, connection: Any) -> None:
    """`step` in a process of its own, whatever happens to it."""
    warnings.simplefilter("ignore")
    # A trace that fails prints its graph.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    connection.send(step(name, num_stages, is_inside))


def attempt(name: str, num_stages: int, is_inside: bool) -> dict[str, Any]:
    """The row of one model, number of stages and place of the loss, within the time limit."""
    receiving, sending = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run_step, args=(name, num_stages, is_inside, sending))
    process.start()
    sending.close()
    row: dict[str, Any] = {"traces": False, "splits": False, "trains": False}
    try:
        row |= receiving.recv() if receiving.poll(LIMIT_S) else {"error": f"no end within {LIMIT_S:.0f} s"}
    except EOFError:
        row["error"] = "the process died"
    process.kill()
    process.join()
    return {"model": name, "asked_stages": num_stages, "is_loss_inside": is_inside, **row}


def installed(names: Iterable[str]) -> list[str]:
    """Those whose library is here."""
    return [name for name in names if find_spec(models.ROWS[name].package)]


def measure(names: list[str], stages: Sequence[int] = (2, 3, 4)) -> Iterator[dict[str, Any]]:
    """A row for every model and number of stages; with the loss outside where inside does not train."""
    for name in names:
        has_own_loss = models.loss_of(name) is None
        for num_stages in stages:
            row = attempt(name, num_stages, is_inside=has_own_loss)
            if has_own_loss and not row["trains"]:
                row = attempt(name, num_stages, is_inside=False) | {"error_inside": row["error"]}
            yield row


def verdict(row: dict[str, Any]) -> str:
    """A row in a few words."""
    if not row["traces"]:
        return "does not trace"
    if not row["splits"]:
        return f"{row['num_stages']} stages" if "num_stages" in row else "does not split"
    if not row["trains"]:
        return "does not train"
    worst = max(row["worst_gradient_off"], row["loss_off"])
    if worst > CLOSE:
        return f"gradients off by {worst:.0%}".replace("%", " %")
    return "equal to the bit" if worst == 0 else f"equal to {worst:.0e}"


def table(rows: list[dict[str, Any]], stages: list[int]) -> str:
    """Markdown: a line for each model, a column for each number of stages, and what went wrong first."""
    cells = {(row["model"], row["asked_stages"]): row for row in rows}
    lines = [
        "| model | " + " | ".join(f"{each} stages" for each in stages) + " | loss | why not |",
        "|---|" + "---|" * (len(stages) + 2),
    ]
    for name in dict.fromkeys(row["model"] for row in rows):
        line = [cells[name, each] for each in stages]
        errors = dict.fromkeys(row["error"] for row in line if "error" in row)
        inside = "inside" if all(row["is_loss_inside"] for row in line) else "outside"
        lines.append(f"| {name} | {' | '.join(map(verdict, line))} | {inside} | {'; '.join(errors)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What torch's own pipeline() makes of the models of the zoo.")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=list(models.NAMES), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="every figure, on one line for each row")
    options = parser.parse_args()
    rows = []
    for row in measure(installed(options.models), options.stages):
        rows.append(row)
        print(
            json.dumps(row) if options.json else f"{row['model']}, {row['asked_stages']} stages: {verdict(row)}",
            file=sys.stdout if options.json else sys.stderr,
            flush=True,
        )
    if not options.json:
        print(table(rows, options.stages))


if __name__ == "__main__":
    main()
