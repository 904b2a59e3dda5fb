"""What the seconds come to: one row of the table for a trial, and whether the bar is met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from benchmarks.peers.trial import Trial

TOLERANCE = 1e-4  # relative, of the losses of the warm-up steps


@dataclass(frozen=True)
class Spread:
    """The median of some figures with the quartiles around it."""

    median: float
    first_quartile: float
    third_quartile: float
    num_steps: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        first, median, third = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, first, third, len(values))


@dataclass(frozen=True)
class Bar:
    """What Pipeloom's median needs, said of torch's.

    Attributes:
        ratio: Pipeloom's median ÷ torch's.
        needed: what the ratio has to be.
    """

    ratio: float
    needed: str
    is_met: bool


@dataclass(frozen=True)
class Row:
    """One trial in figures.

    Attributes:
        unit: of the spreads: "excess" of a step over its simulated makespan, "step_s_per_action", "tokens_per_s".
        peers: by name.
        cpu_s_per_step: by peer, of all processes together: what a step costs where cores are short, whatever else
            the machine does.
        bar: None where Pipeloom or torch did not take part, or the comparison is void.
        loss_difference: the largest relative one between peers that had the same data; None on virtual devices.
        is_void: the peers did not compute the same.
    """

    row: str
    unit: str
    schedule: str
    num_ranks: int
    num_microbatches: int
    peers: dict[str, Spread]
    cpu_s_per_step: dict[str, float]
    bar: Bar | None
    loss_difference: float | None = None
    is_void: bool = False


@dataclass(frozen=True)
class MemoryRow:
    """Row (d): the peak resident memory of a peer's processes, in processes of its own.

    Attributes:
        peak_bytes: by rank; None where the system does not tell.
        above_idle_bytes: of it, what was not there with torch loaded and nothing made.
        ratio: the largest peak ÷ torch's largest; None for torch.
    """

    peer: str
    peak_bytes: list[int | None]
    above_idle_bytes: list[int | None]
    ratio: float | None = None
    row: str = "d"


def virtual_row(trial: Trial, seen: Sequence[dict[str, Any]]) -> Row:
    """Rows (a) and (b): a step beside its simulation, or, where stages take no time, beside its actions."""
    steps_s: dict[str, list[float]] = seen[0]["steps_s"]
    if trial.forward_s or trial.backward_s:
        makespan_s = simulated_s(trial)
        peers = _spreads(steps_s, lambda step_s: step_s / makespan_s - 1)
        return _row(trial, seen, "excess", peers, at_most(0.5, peers))
    num_actions = 2 * trial.num_microbatches
    peers = _spreads(steps_s, lambda step_s: step_s / num_actions)
    return _row(trial, seen, "step_s_per_action", peers, at_most(0.5, peers))


def throughput_row(trial: Trial, seen: Sequence[dict[str, Any]], tokens_per_step: int) -> Row:
    """Row (c): tokens a second, if all peers have the same losses on the same data."""
    peers = _spreads(seen[0]["steps_s"], lambda step_s: tokens_per_step / step_s)
    difference = loss_difference([losses_of(peer, seen)[: trial.num_warmup_steps] for peer in trial.peers])
    is_void = not difference <= TOLERANCE
    bar = None if is_void else at_least(1.0, peers)
    return _row(trial, seen, "tokens_per_s", peers, bar, difference, is_void)


def memory_row(peer: str, seen: Sequence[dict[str, Any]]) -> MemoryRow:
    peaks = [each["peak_bytes"] for each in seen]
    above = [None if each["peak_bytes"] is None else each["peak_bytes"] - each["idle_peak_bytes"] for each in seen]
    return MemoryRow(peer, peaks, above)


def beside_torch(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """The rows with their ratios, where torch is among them and the system tells."""
    highest = {row.peer: max(peak or 0 for peak in row.peak_bytes) for row in rows}
    limit = highest.get("torch")
    return [replace(row, ratio=highest[row.peer] / limit) if limit and row.peer != "torch" else row for row in rows]


def simulated_s(trial: Trial) -> float:
    import pipeloom as pl
    from pipeloom.testing import virtual_costs

    made = pl.schedule(trial.schedule, num_ranks=trial.num_processes, num_microbatches=trial.num_microbatches)
    costs = virtual_costs(trial.num_processes, trial.forward_s, trial.backward_s)
    return float(pl.simulate(made, costs).makespan_s)


def losses_of(peer: str, seen: Sequence[dict[str, Any]]) -> list[float]:
    """Those of the first process that has any: not all peers tell every process."""
    found: list[list[float]] = [each["losses"][peer] for each in seen if each["losses"][peer]]
    return found[0] if found else []


def loss_difference(losses: Sequence[Sequence[float]]) -> float:
    """The largest relative difference between anybody's loss and the first's; infinite where one is missing or NaN."""
    if not all(losses) or len({len(each) for each in losses}) != 1 or not all(map(math.isfinite, chain(*losses))):
        return math.inf
    steps: Iterable[tuple[float, ...]] = zip(*losses, strict=True)
    return max(abs(other - first) / abs(first) for first, *others in steps for other in [first, *others])


def at_most(share: float, peers: dict[str, Spread]) -> Bar | None:
    ratio = _ratio(peers)
    return None if ratio is None else Bar(ratio, f"≤ {share:g}", ratio <= share)


def at_least(share: float, peers: dict[str, Spread]) -> Bar | None:
    ratio = _ratio(peers)
    return None if ratio is None else Bar(ratio, f"≥ {share:g}", ratio >= share)


def _ratio(peers: dict[str, Spread]) -> float | None:
    if not {"pipeloom", "torch"} <= peers.keys():
        return None
    return peers["pipeloom"].median / peers["torch"].median


def _spreads(steps_s: dict[str, list[float]], figure: Callable[[float], float]) -> dict[str, Spread]:
    return {peer: Spread.of([figure(step_s) for step_s in times]) for peer, times in steps_s.items()}


def _row(
    trial: Trial,
    seen: Sequence[dict[str, Any]],
    unit: str,
    peers: dict[str, Spread],
    bar: Bar | None,
    difference: float | None = None,
    is_void: bool = False,
) -> Row:
    shape = (trial.num_processes, trial.num_microbatches)
    num_steps = trial.num_rounds * trial.num_steps
    cpu_s = {peer: sum(each["cpu_s"][peer] for each in seen) / num_steps for peer in peers}
    return Row(trial.row, unit, trial.schedule, *shape, peers, cpu_s, bar, difference, is_void)
