"""The schedules by name. A new one is a file beside this and a line in `_ALL`."""

from __future__ import annotations

import re
from typing import Any

from pipeloom.errors import ScheduleError, UnknownSchedule, UnsupportedShape, near
from pipeloom.ir import Schedule
from pipeloom.ir.counts import is_whole
from pipeloom.schedules.chimera import ENTRY as CHIMERA
from pipeloom.schedules.dualpipe import ENTRY as DUALPIPE
from pipeloom.schedules.dualpipe_v import ENTRY as DUALPIPE_V
from pipeloom.schedules.eager_one_f_one_b import ENTRY as EAGER_ONE_F_ONE_B
from pipeloom.schedules.entry import Entry, Generator
from pipeloom.schedules.forward_only import forward_only as without_backward
from pipeloom.schedules.gis import ENTRY as GIS
from pipeloom.schedules.gis_h import ENTRY as GIS_H
from pipeloom.schedules.gpipe import ENTRY as GPIPE
from pipeloom.schedules.gpipe_recompute import ENTRY as GPIPE_RECOMPUTE
from pipeloom.schedules.hanayo import ENTRY as HANAYO
from pipeloom.schedules.interleaved import ENTRY as INTERLEAVED
from pipeloom.schedules.interleaved_zb import ENTRY as INTERLEAVED_ZB
from pipeloom.schedules.looped_bfs import ENTRY as LOOPED_BFS
from pipeloom.schedules.one_f_one_b import ENTRY as ONE_F_ONE_B
from pipeloom.schedules.pipedream import ENTRY as PIPEDREAM
from pipeloom.schedules.pipedream_2bw import ENTRY as PIPEDREAM_2BW
from pipeloom.schedules.pipedream_vertical_sync import ENTRY as PIPEDREAM_VERTICAL_SYNC
from pipeloom.schedules.shape import Shape, require
from pipeloom.schedules.stage_costs import StageCosts
from pipeloom.schedules.v_half import ENTRY as V_HALF
from pipeloom.schedules.v_min import ENTRY as V_MIN
from pipeloom.schedules.zb_1p import ENTRY as ZB_1P
from pipeloom.schedules.zb_2p import ENTRY as ZB_2P
from pipeloom.schedules.zb_h1 import ENTRY as ZB_H1
from pipeloom.schedules.zb_h2 import ENTRY as ZB_H2
from pipeloom.schedules.zb_v import ENTRY as ZB_V

_ALL = (
    GPIPE,
    ONE_F_ONE_B,
    EAGER_ONE_F_ONE_B,
    INTERLEAVED,
    LOOPED_BFS,
    GPIPE_RECOMPUTE,
    ZB_H1,
    ZB_H2,
    ZB_1P,
    ZB_2P,
    INTERLEAVED_ZB,
    ZB_V,
    V_HALF,
    V_MIN,
    DUALPIPE,
    DUALPIPE_V,
    CHIMERA,
    HANAYO,
    GIS,
    GIS_H,
    PIPEDREAM,
    PIPEDREAM_VERTICAL_SYNC,
    PIPEDREAM_2BW,
)
ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _ALL}
GENERATORS: dict[str, Generator] = {name: entry.generate for name, entry in ENTRIES.items()}


def schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    costs: StageCosts | None = None,
    forward_only: bool = False,
    **options: Any,
) -> Schedule:
    """Make the schedule of that name.

    Args:
        name: a key of `ENTRIES` or an alias; case, blanks, ``-`` and ``_`` do not matter.
        num_ranks: how many ranks the pipeline has, at least 1.
        num_microbatches: how many micro-batches one step has, at least 1.
        stages_per_rank: how many stages a rank holds; None: the schedule's own number, 1 or 2.
        costs: what stages cost (`pipeloom.Costs`), for schedules that are made from it; others are the same for all.
        forward_only: leave the backwards out, for evaluation.
        options: of that schedule alone: ``group_size`` of the interleaved ones, ``microbatches_per_update`` of those
            that update weights.

    Raises:
        UnknownSchedule: no schedule has that name; near names are offered.
        UnsupportedShape: the schedule does not exist for these counts; the nearest that it exists for are named.
        ScheduleError: the schedule has no such option.
        CostError: the costs are for another number of stages.
    """
    found = entry(name)
    wanted = found.stages_per_rank if stages_per_rank is None else stages_per_rank
    for counted, count in (("ranks", num_ranks), ("micro-batches", num_microbatches), ("stages per rank", wanted)):
        if not is_whole(count):
            raise UnsupportedShape(f"{count!r} was given for the number of {counted}; a whole number is needed")
    _check_options(found, options)
    shape = Shape(int(num_ranks), int(num_microbatches), int(wanted))
    require(found.name, shape, *found.demands)
    if "costs" in found.takes:
        options["costs"] = costs
    made = found.made(shape, options)
    return without_backward(made) if forward_only else made


def entry(name: str) -> Entry:
    """What is known of the schedule of that name.

    Raises:
        UnknownSchedule: no schedule has that name; near names are offered.
    """
    found = _BY_KEY.get(_key(name)) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(ENTRIES)
        raise UnknownSchedule(f"schedule {name!r} is unknown; the known ones are {known}", near(str(name), _SPELLINGS))
    return found


def _check_options(found: Entry, options: dict[str, Any]) -> None:
    own = found.takes - {"stages_per_rank", "costs"}
    for option in options:
        if option not in own:
            has = f"its own are {', '.join(sorted(own))}" if own else "it has none of its own"
            raise ScheduleError(f"option {option!r} was given to schedule {found.name!r}; {has}", near(option, own))


def _key(name: str) -> str:
    """A name as it is looked up: torch's ``ScheduleInterleaved1F1B`` is ``interleaved1f1b``."""
    return re.sub(r"[-_\s]", "", name).lower().removeprefix("schedule")


_SPELLINGS = [spelling for each in _ALL for spelling in (each.name, *each.aliases)]
_BY_KEY = {_key(spelling): each for each in _ALL for spelling in (each.name, *each.aliases)}
