"""A model of any kind, cut by running it.

Which modules are units, and which stage runs which, is decided once, from the first inputs. What crosses a cut is
worked out for every form of inputs that comes along, and for every way that the model's code takes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.trees import flatten
from pipeloom.errors import UncuttableCode
from pipeloom.recording.dry_run import DryRun
from pipeloom.recording.ignored_draws import NotingRun, are_ignored
from pipeloom.recording.ops import INPUT, Recording, Value
from pipeloom.recording.plainly import Draws, no_draws
from pipeloom.recording.process_draws import refuse_process_draws
from pipeloom.recording.refusals import cannot_cut, check_ready, not_here, too_early
from pipeloom.splitting.choose import Weights, choose_units, count, is_heavy, late_ones, skipped
from pipeloom.splitting.cuts import Cuts, checked, place_cuts
from pipeloom.splitting.dataflow import Flow, flow
from pipeloom.splitting.homes import stages_of
from pipeloom.splitting.hooks import refuse_backward_hooks
from pipeloom.splitting.owners import Owners, is_inside
from pipeloom.splitting.plan import Plan
from pipeloom.splitting.replay import OtherWay, other_way
from pipeloom.splitting.structure import Structure
from pipeloom.splitting.survey import first_that_goes, surveyed
from pipeloom.splitting.together import check_together, together
from pipeloom.splitting.tree import Tree, inputs_of, own_inputs
from pipeloom.splitting.unit import Unit
from pipeloom.standins.functions import Met
from pipeloom.standins.placeholder import NoNumbers
from pipeloom.standins.spec import Modes, spec
from pipeloom.standins.stand_ins import stand_in

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_MOST_FORMS, _MOST_WAYS = 64, 32
"""Of inputs and modes, and of ways that the code takes with them, of which plans are kept; others are made again."""


class Cut:
    """A model, its units, and the stage of each call of a unit.

    Args:
        root: the model.
        args: inputs for a dry run.
        kwargs: likewise.
        num_stages: how many stages.
        cuts: where to cut; None balances.

    Raises:
        SplitError: it has fewer units than stages, or its code depends on numbers that one stage only has.
    """

    def __init__(self, root: nn.Module, inputs: Inputs, num_stages: int | None, cuts: Cuts | None) -> None:
        cuts = checked(cuts)
        self.root = root
        self._plans: dict[Hashable, list[Plan]] = {}
        self.opaque: set[str] = set()
        self._owned: frozenset[tuple[str, str]] = frozenset()
        check_ready(root)
        stand_in(root)
        tree, seeds = surveyed(root, inputs, self.opaque)
        self.weights = Weights(count(root), tree.num_flops)
        wanted = num_stages or (cuts and len(cuts) + 1) or 1
        descend = {each.rpartition(".")[0] for each in cuts or () if isinstance(each, str)}
        descend = {".".join(name.split(".")[: i + 1]) for name in descend for i in range(name.count(".") + 1)}
        self.units = choose_units(tree, self.opaque, wanted, descend)
        refuse_backward_hooks((n, each) for n, each in root.named_modules() if not self._is_inside(n))
        recording = self.first = first_that_goes(partial(self._recorded, inputs, no_draws), seeds)
        if recording.tail is not None and len(recording.unit_ops) < wanted:
            raise self._too_early(recording.tail, wanted)
        weights = self._unit_weights(recording)
        starts = place_cuts(recording, weights, num_stages, cuts, together(recording, self._owned))
        self.num_stages = len(starts) + 1
        beside = skipped(tree, self.units, [place for op in recording.ops for place in op.weights])
        self.units += list(beside)
        late = set[str]() if recording.tail is None else late_ones(beside, self.units)
        if recording.tail is not None and cuts is None and is_heavy(root, late, wanted):
            raise self._too_early(recording.tail, wanted)
        self._stage_of_call: dict[tuple[str, int], int] = {}
        for index, op in enumerate(recording.unit_ops):
            self._stage_of_call[op.what, op.call] = sum(index >= start for start in starts)
        for name, unit in beside.items():
            now = self.num_stages - 1 if name in late else self._stage_of_call[unit, 0]
            self._stage_of_call.setdefault((name, 0), now)
        self.plan_of_first = Plan(recording, self._flow(recording))
        self._owners = Owners(root, self.units, self._stage_of_call, self.plan_of_first, self._owned, self.num_stages)
        self.stages, self._trees = self._owners.stages, self._owners.trees
        self._modes = Modes(root, self._is_around)
        self._modes_then: Hashable = None
        is_cloned = self._owners.is_cloned
        self._structure = Structure(root, lambda n: n in self.units or is_cloned(n), is_cloned)
        self._probe = Tree(root, self.units, {}, self._owners.shared_buffers, is_first=False)

    def _too_early(self, tail: UncuttableCode, wanted: int) -> UncuttableCode:
        """The refusal, with the nearest cuts that work: as many as there are units for."""
        names = [op.what for op in self.first.unit_ops]
        starts = [name for name in dict.fromkeys(names) if name != names[0]][1 - wanted :]
        return too_early(tail, names, wanted, starts)

    @property
    def everywhere(self) -> tuple[Unit, ...]:
        """The buffers of parents: every process has them."""
        return self._owners.everywhere(self._owned)

    def _is_inside(self, module: str) -> bool:
        return is_inside(module, self.units)

    def _is_around(self, module: str) -> bool:
        return not self._is_inside(module)

    def _unit_weights(self, recording: Recording) -> list[float]:
        modules, seen, found = dict(self.root.named_modules(remove_duplicate=False)), set[str](), []
        for op in recording.unit_ops:
            own = 0 if op.what in seen else count(modules[op.what])
            seen.add(op.what)
            found.append(self.weights.of(own, op.num_flops))
        return found

    # Plans.

    def plan(self, inputs: Inputs, draws: Draws = no_draws) -> Plan:
        """The plan for inputs like these; makes one if there is none.

        Args:
            inputs: of one micro-batch.
            draws: put around glue that draws random numbers, as the stages will.
        """
        modes = self._modes.now()
        if modes != self._modes_then:
            self.carry_home()
            self._modes_then = modes = self._modes.now()
            for tree in (*self._trees.values(), self._probe):
                tree.clones.follow()
            self._trees[max(self._trees)].remember()
        key = spec(inputs), modes
        known = self._plans[key] = self._plans.pop(key, [])  # the newest last
        if len(self._plans) > _MOST_FORMS:
            del self._plans[next(iter(self._plans))]
        for plan in known:
            if not plan.recording.has_reads or self._takes(plan, inputs, draws):
                return plan
        recording = self._recorded(inputs, draws)
        known.insert(0, Plan(recording, self._flow(recording)))
        del known[_MOST_WAYS:]
        return known[0]

    def refresh(self) -> None:
        """Before a step: what stages have of their parents is as in the model."""
        self._owners.refresh()

    def carry_home(self) -> None:
        """Give the model's parents what their code has counted: that of the latest stage here, which runs furthest."""
        self._trees[max(self._trees)].carry_home()

    def _takes(self, plan: Plan, inputs: Inputs, draws: Draws) -> bool:
        """Whether the model's code takes the plan's way with these inputs."""
        self._probe.refresh()
        given = own_inputs(plan.recording, *inputs)
        try:
            self._probe.run(plan.recording, plan.flow, None, given, {}, draws)
        except OtherWay:
            return False
        return True

    def _recorded(self, inputs: Inputs, draws: Draws, seed: int = 0) -> Recording:
        while True:
            run = DryRun(self.root, self.units, self.opaque, draws, owned=self._owned, seed=seed)
            try:
                recording = run.run(*inputs)
            except Met:
                continue
            except NoNumbers as error:
                if not self._kept_whole(error):
                    raise cannot_cut(error) from error
                continue
            if run.owned == self._owned:
                again = partial(NotingRun, self.root, self.units, self.opaque, draws, owned=self._owned, seed=seed)
                if run.process_draws.has_moved and not are_ignored(again, inputs):
                    refuse_process_draws(again(), inputs)
                return recording
            self._owned = run.owned

    def _flow(self, recording: Recording) -> Flow:
        calls, first = ([(op.what, op.call) for op in each.unit_ops] for each in (recording, self.first))
        stages = stages_of(calls, first, self._stage_of_call)
        check_together(together(recording, self._owned), stages, recording)
        return flow(recording, stages, self.num_stages)

    def _kept_whole(self, error: NoNumbers) -> bool:
        """Make the module whose code looks at numbers one that is not looked into, if that is still possible."""
        stack: list[str] = [name for name in getattr(error, "stack", ()) if name]
        within = [name for name in stack if name in self.units]
        whole = within[0] if within else (stack[-1] if stack and not hasattr(self, "stages") else None)
        if whole is None or whole in self.opaque:
            return False
        self.opaque.add(whole)
        if not within:
            self.units = [name for name in self.units if not name.startswith(f"{whole}.")] + [whole]
        return True

    # Running.

    def parents(self, stage: int) -> nn.Module:
        """The buffers that the parents' code of a stage reads and writes."""
        return self._trees[stage].parents

    def part(self, stage: int, device: torch.device | None = None) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
        """What runs a stage's part of a forward: ``part(plan, inputs, received, draws)``, as `run` does.

        Args:
            stage: which.
            device: where it will be; None: where the model is.
        """
        if device is not None:
            own = [each for unit in self.stages[stage] for each in unit.module.parameters()]
            self._trees[stage].place(device, own)

        def part(plan: Plan, inputs: Inputs, received: Sequence[Tensor], draws: Draws) -> tuple[Any, tuple[Any, ...]]:
            return self.run(plan, stage, inputs, received, draws)

        return part

    def run(
        self, plan: Plan, stage: int, inputs: Inputs, received: Sequence[Tensor], draws: Draws
    ) -> tuple[Any, tuple[Any, ...]]:
        """Run a stage's part of a forward.

        Args:
            plan: for these inputs.
            stage: which.
            inputs: the model's, of one micro-batch.
            received: what ``plan.stage(stage).incoming`` names.
            draws: put around units.

        Returns:
            The model's output if the stage is the last, and the tensors that ``outgoing`` names.
        """
        own = plan.stage(stage)
        values = dict(zip(own.incoming, received, strict=True))
        args, kwargs = inputs_of(plan.recording, stage, *own_inputs(plan.recording, *inputs), values)
        try:
            out, value = self._trees[stage].run(plan.recording, plan.flow, stage, (args, kwargs), values, draws)
        except (OtherWay, NoNumbers) as error:
            raise (other_way(error) if isinstance(error, OtherWay) else not_here(error)) from error
        leaves = _leaves(args, kwargs) if any(each.op == INPUT for each in own.outgoing) else ()
        return out, tuple(leaves[v.leaf] if v.op == INPUT else value(v) for v in own.outgoing)

    def run_whole(self, plan: Plan, inputs: Inputs, draws: Draws) -> Any:
        """Run all stages one after another, in one graph."""
        made: dict[Value, Any] = {}
        out = None
        for stage in range(self.num_stages):
            own = plan.stage(stage)
            out, values = self.run(plan, stage, inputs, [made[v] for v in own.incoming], draws)
            made.update(zip(own.outgoing, values, strict=True))
        return out

    def check_unchanged(self) -> None:
        """Raise if a unit, or a module around units, was replaced, added or removed since the model was cut.

        Raises:
            RuntimeStateError: the stages would run the old one.
        """
        self._structure.check()

    def free(self, stages: Sequence[int]) -> None:
        """Keep only the trees of ``stages``, without weights that other processes have."""
        for stage in self._trees.keys() - set(stages):
            del self._trees[stage]
        self._trees[min(stages)].write_through()
        own = {id(each) for stage in stages for unit in self.stages[stage] for each in unit.module.parameters()}
        for tree in (*self._trees.values(), self._probe):
            tree.free(own)


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    return flatten((args, kwargs))[0]
