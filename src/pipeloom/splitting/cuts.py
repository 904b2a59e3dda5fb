"""Where the stages of a recorded model begin."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from pipeloom.errors import SplitError, UncuttableCode
from pipeloom.ir.counts import is_whole
from pipeloom.recording.ops import Recording
from pipeloom.splitting.balance import balanced_cuts
from pipeloom.splitting.together import Bond

_MOST_BONDS = 3
"""Of those that keep calls together, so many are named."""

Cuts = Sequence[int] | Sequence[str]
"""Indices of calls of units, names of modules, or the number of calls in each stage."""


def place_cuts(
    recording: Recording,
    weights: Sequence[float],
    num_stages: int | None,
    cuts: Cuts | None,
    together: Sequence[Bond] = (),
) -> list[int]:
    """The first call of a unit in each stage but the first.

    Args:
        recording: its calls of units are what is cut between.
        weights: of each call.
        num_stages: how many stages.
        cuts: ``[2, 5]`` starts stages before calls 2 and 5; names start them before the first call of a module, or
            within it; as many numbers as stages, which add up to the number of calls, are sizes. None balances.
        together: ranges of calls that one stage runs.

    Raises:
        SplitError: there are too few calls, or the cuts make no sense.
    """
    names = [op.what for op in recording.unit_ops]
    if cuts is not None:
        starts = _asked(names, cuts, num_stages)
        _check_together(names, starts, together)
        return starts
    num_stages = num_stages or 1
    groups = _groups(len(names), together)
    if not names and num_stages > 1:
        raise SplitError(
            f"num_stages={num_stages} was given, but the model's forward was seen to call none of its modules; a cut "
            "is between such calls",
            "let it call them (not torch's functions with their weights, and no copies of them in objects of its own)",
        )
    if len(groups) < num_stages:
        raise _too_few(names, groups, num_stages, together)
    sums = [sum(weights[start:end]) for start, end in groups]
    return [groups[index][0] for index in balanced_cuts(sums, num_stages)]


def _too_few(
    names: Sequence[str], groups: Sequence[tuple[int, int]], num_stages: int, together: Sequence[Bond]
) -> SplitError:
    """The refusal, with what keeps calls together."""
    parts = [names[start] if end == start + 1 else f"{names[start]} to {names[end - 1]}" for start, end in groups]
    noun = "part" if len(parts) == 1 else "parts"
    message = (
        f"num_stages={num_stages} was given, but the model has {len(parts)} {noun} that a cut can separate: "
        f"{', '.join(parts[:8])}{', …' if len(parts) > 8 else ''}"
    )
    widest: dict[str, Bond] = {}
    for bond in sorted(together, key=lambda each: each.last - each.first):
        widest[bond.why] = bond
    for first, last, why in list(widest.values())[-_MOST_BONDS:]:
        message += f". The calls from {names[first]!r} to {names[last]!r} have to be in one stage: {why}"
    if len(names) < num_stages:
        return SplitError(message, "ask for fewer stages, or name places inside of them with cuts=")
    hint = (
        f"ask for at most {len(parts)}, or let the model's code do without"
        if len(parts) > 1
        else ("let the model's code do without")
    )
    return UncuttableCode(message, f"{hint} what keeps these calls together")


def _groups(num_calls: int, together: Sequence[Bond]) -> list[tuple[int, int]]:
    joined = {index for first, last, _ in together for index in range(first + 1, last + 1)}
    starts = [index for index in range(num_calls) if index not in joined]
    return list(pairwise([*starts, num_calls]))


def asked(cuts: Cuts | None) -> Cuts | None:
    """Cuts that a user names; None for "auto": they are to be found."""
    return None if isinstance(cuts, str) and cuts == "auto" else cuts


def checked(cuts: Any) -> Cuts | None:
    """Cuts as a list.

    Raises:
        SplitError: they are none: one name or number, a set, or of two kinds.
    """
    cuts = cuts.tolist() if hasattr(cuts, "tolist") else cuts  # of numpy
    if cuts is None:
        return None
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise SplitError(
            f"cuts={cuts!r} was given; a list of indices, of names, or of sizes is needed",
            f"cuts=[{cuts!r}] starts one more stage there" if isinstance(cuts, str) or is_whole(cuts) else None,
        )
    if not all(isinstance(each, str) for each in cuts) and not all(map(is_whole, cuts)):
        raise SplitError(f"cuts={list(cuts)} were given; indices, names or sizes are needed, and all of one kind")
    return list(cuts)


def _asked(names: Sequence[str], cuts: Cuts, num_stages: int | None) -> list[int]:
    if all(isinstance(each, str) for each in cuts):
        starts = [index_of(names, str(each)) for each in cuts]
    else:
        is_sizes = num_stages == len(cuts) and sum(map(int, cuts)) == len(names)
        starts = list(accumulate(map(int, cuts)))[:-1] if is_sizes else list(map(int, cuts))
    if num_stages is not None and len(starts) != num_stages - 1:
        raise SplitError(f"cuts={list(cuts)} make {len(starts) + 1} stages, but num_stages={num_stages} was given")
    bounds = [0, *starts, len(names)]
    if any(before >= after for before, after in pairwise(bounds)):
        raise SplitError(
            f"cuts={list(cuts)} were given, which start stages before calls {starts}; they must ascend, from 1 to "
            f"{len(names) - 1}, each the first call of a new stage",
            f"the calls are {', '.join(f'{i} {name}' for i, name in list(enumerate(names))[:12])}"
            f"{', …' if len(names) > 12 else ''}",
        )
    return starts


def index_of(names: Sequence[str], wanted: str) -> int:
    """The first call of a module, or within it.

    Raises:
        SplitError: there is none.
    """
    for index, name in enumerate(names):
        if name == wanted or name.startswith(f"{wanted}."):
            return index
    whole = next((name for name in names if wanted.startswith(f"{name}.")), None)
    if whole is not None:
        raise SplitError(
            f"cuts=[…, {wanted!r}, …] was given, but {whole!r} stays whole: it calls no module of that name, or what "
            "it calls depends on numbers that one stage only has",
            f"cut before {whole!r}, or after it",
        )
    known = {".".join(parts[: i + 1]) for parts in (name.split(".") for name in names) for i in range(len(parts))}
    near = difflib.get_close_matches(wanted, sorted(known), n=3) or list(dict.fromkeys(names))[:6]
    raise SplitError(
        f"cuts=[…, {wanted!r}, …] was given, but no module of that name was called",
        f"names are those of named_modules(), for example {', '.join(near)}",
    )


def _check_together(names: Sequence[str], starts: Sequence[int], together: Sequence[Bond]) -> None:
    for start in starts:
        for first, last, why in together:
            if first < start <= last:
                raise SplitError(
                    f"a cut before call {start} ({names[start]}) would separate call {first} ({names[first]}) from "
                    f"{last} ({names[last]}); {why}",
                    f"cut before call {first}, or after call {last}",
                )
