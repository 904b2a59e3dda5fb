"""The dry run: a model's own code runs, with placeholders for its weights, and every call is noted.

Nothing is allocated for weights and activations, and nothing of the model changes: it runs on shallow clones, with
copies of small buffers. A module whose shapes depend on numbers (a router of experts) runs once for real, on numbers
that were made up, outside of everything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.trees import flatten, unflatten
from pipeloom.chance import are_keyed
from pipeloom.recording import bonds, plain, uncertain
from pipeloom.recording.buffers import Buffers
from pipeloom.recording.caches import Caches
from pipeloom.recording.effects import Effects
from pipeloom.recording.filled import Changes, Containers, Filled
from pipeloom.recording.global_state import Globals
from pipeloom.recording.made_up import run_for_real
from pipeloom.recording.node import Node
from pipeloom.recording.ops import INPUT, Effect, Kind, Op, Recording, Same, Value
from pipeloom.recording.plainly import Draws, drawn_around, no_draws
from pipeloom.recording.prepare import device_of, is_written, prepare, version_of, written_among
from pipeloom.recording.process_draws import ProcessDraws
from pipeloom.recording.raised import raised
from pipeloom.recording.reached import check_outside, check_seen, check_written
from pipeloom.recording.refusals import cannot_cut, in_dry_run
from pipeloom.recording.shared import sharing
from pipeloom.recording.tail import reachable
from pipeloom.recording.touched import Touched
from pipeloom.recording.values import Values
from pipeloom.standins import opaque
from pipeloom.standins.clone import Call, Clones, weights_of_modules
from pipeloom.standins.followed import Place
from pipeloom.standins.functions import look
from pipeloom.standins.glue import DRAWS, READS, SHAPES, Seen, read, tensors_in, unseen
from pipeloom.standins.placeholder import (
    Computing,
    NoNumbers,
    Placeholder,
    Unseen,
    computing,
    is_about_numbers,
    storage_of,
)
from pipeloom.standins.spec import form


class DryRun:
    """One run of a model on placeholders.

    Args:
        root: the model; it stays as it is.
        units: names of the modules whose calls are one op; None notes the tree of calls of all modules instead.
        opaque: names of modules whose shapes depend on numbers; they run for real, on numbers made up.
        draws: put around glue that draws random numbers.
        device: where the model is, which placeholders report.
        owned: buffers that one stage has, by module and name, because code of parents writes values of it into them.
        seed: of draws around which nothing is put.

    Attributes:
        recording: what was seen.
        has_drawn: whether its code drew random numbers that nobody seeded.
        tree: the call of the root, with those within it; only without ``units``.
        is_inside: whether the code of a unit runs now.
        process_draws: whether code around units drew from generators of the process.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Collection[str] | None,
        opaque: set[str],
        draws: Draws = no_draws,
        device: torch.device | None = None,
        owned: Collection[tuple[str, str]] = (),
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self.has_drawn = False
        self._root = root
        self._units = units
        self._opaque = opaque
        self._draws = draws
        self._device = device or device_of(root)
        self.recording = Recording()
        self.tree = Node("", root)
        self._stack = [self.tree]
        self._clones = Clones(root, lambda name, _: name != "", self._answer)
        self._values = Values(self.recording)
        self._globals = Globals(self._clones, self._is_of_batch)
        self._caches = Caches(self._clones)
        self._variable: set[int] = set()
        self._calls: Counter[str] = Counter()
        self.is_inside = False
        self._called_unseen: NoNumbers | None = None
        self.process_draws = ProcessDraws()
        self._mode = Seen(self._glue_noted)
        self._now = Computing()
        self._buffers = Buffers(prepare(self._clones, self._values, self._device, frozenset(owned)), owned)
        self._touched = Touched(self._clones, units or ())

    @property
    def owned(self) -> frozenset[Place]:
        """Those of ``owned``, and other buffers that turned out to be such."""
        return self._buffers.owned

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Call the model.

        Raises:
            NoNumbers: its code asks for numbers of a placeholder; ``stack`` says within which modules.
        """
        leaves = self._opened(args, kwargs)
        args, kwargs = unflatten(leaves, flatten((args, kwargs))[1])
        versions = [version_of(leaf) for leaf in leaves]
        shared = sharing(self._clones, self._units, self.recording)
        # Where nobody says how to draw, the same numbers each time, and none of the user's.
        around = drawn_around(self._draws, self._seed)
        with torch.random.fork_rng(devices=[]), shared, computing() as self._now, around as chance:
            torch.default_generator.manual_seed(self._seed)  # not those of other devices, which nobody puts back
            state = torch.get_rng_state()
            self._caches.note(self._units)
            try:
                with in_dry_run(), self._globals.kept():
                    out = self._called(args, kwargs)
            finally:
                self.tree.num_flops = self._now.num_flops
                self.recording.is_by_chance = chance.is_used
                self.has_drawn = chance.is_used or not torch.equal(torch.get_rng_state(), state)
        self.process_draws.look()
        if self._units is not None:
            self._touched.end(self.recording)
            with self._refusing():
                self._note_results(out)
        self.recording.caches = self._caches.found(self._values.is_of_weights)
        self.recording.written_inputs = written_among(leaves, versions)
        self.recording.written_buffers = self._buffers.written()
        return self.recording

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the clone of the model; if its own code looks at numbers, all that code can still use is its output."""
        if self._units is None:
            with self._refusing(), Seen(self._globals.called):
                return self._clones.root(*args, **kwargs)
        try:
            with self._mode:
                return self._clones.root(*args, **kwargs)
        except NoNumbers as error:
            op: Op | None = getattr(error, "op", None)
            if isinstance(error, Unseen) or op is None or op.kind is Kind.UNIT or any(getattr(error, "stack", ())):
                raise
            self.recording.tail = cannot_cut(error)
            self.recording.tail.__cause__ = NoNumbers(str(error))  # that error itself would keep the whole run
            del self.recording.ops[op.index :]
            found = [self._values.shadow(each) for each in reachable(error)]
            return [each for each in found if self._values.is_of_model(each)]
        except Exception as error:
            if self._called_unseen is None:
                raise
            raise self._called_unseen from error

    def _note_results(self, out: Any) -> None:
        leaves = [self._values.shadow(leaf) for leaf in flatten(out)[0] if isinstance(leaf, Tensor)]
        self.recording.results = tuple(self._values.inputs(leaves))
        self.recording.result_weights = self._values.weights_among(leaves)
        self._values.forget_dead()

    # What it runs on.

    def _opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Leaves of the inputs: those that require a gradient are values of stage 0, others, copied, everywhere."""
        leaves = flatten((args, kwargs))[0]
        needing = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.recording.grad_inputs = tuple(needing)
        for i, leaf in enumerate(leaves):
            if i in needing:
                leaves[i] = Placeholder.like(leaf, is_leaf=False)
                self._values.note(leaves[i], Value(INPUT, i))
            elif isinstance(leaf, Tensor):
                leaves[i] = leaf.detach().clone()
        self._variable |= {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        self._values.keep(*leaves)
        return leaves

    # Calls of modules.

    def _answer(self, name: str, _: nn.Module, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._units is None:
            return self._survey(name, run, args, kwargs)
        if not self.is_inside:
            self._check_seen(name)
        if name in self._opaque and (self.is_inside or name not in self._units):
            return self._real(name, args, kwargs)
        if self.is_inside or name not in self._units:
            with self._within(name):
                return run(*args, **kwargs)
        left = self._globals.of_unit(self.recording.ops, any(f"{e}.".startswith(f"{name}.") for e in self._opaque))
        with unseen(self._mode), raised(self.recording.ops, self._calls), left:
            return self._unit(name, run, args, kwargs)

    def _check_seen(self, name: str) -> None:
        try:
            with self._refusing():
                check_seen(name, self._mode, self._clones, self._values)
        except NoNumbers as error:
            self._called_unseen = error
            raise

    def _is_of_batch(self, tensor: Tensor) -> bool:
        return self._units is not None and (self._values.is_known(tensor) or id(tensor) in self._variable)

    @contextmanager
    def _within(self, name: str) -> Iterator[Node]:
        node = Node(name, self._clones.originals[name])
        self._stack[-1].children.append(node)
        self._stack.append(node)
        before = self._now.num_flops
        try:
            yield node
        except NoNumbers as error:
            if not hasattr(error, "stack"):
                error.stack = [each.name for each in self._stack]  # type: ignore[attr-defined]
            raise
        finally:
            self._stack.pop()
            node.num_flops = self._now.num_flops - before

    def _survey(self, name: str, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._within(name) as node:
            if name in self._opaque:
                return self._real(name, args, kwargs)
            with Changes((args, kwargs), self._now) as changes:
                try:
                    out = run(*args, **kwargs)
                except (NoNumbers, RuntimeError) as error:
                    if not is_about_numbers(error):
                        raise
                    self._opaque.add(name)
                    node.children.clear()
                    out = self._real(name, args, kwargs)
            has_values = any(isinstance(leaf, Placeholder) for leaf in flatten(out)[0])
            node.is_everywhere = not has_values and not changes.has_any()
            return out

    def _real(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], variant: int = 0) -> Any:
        hooked = self._clones.below(name) if variant == 0 else {}
        out, num_flops = run_for_real(self._clones.originals[name], args, kwargs, self._device, hooked, variant)
        self._now.num_flops += num_flops if variant == 0 else 0
        return out

    def _unit(self, name: str, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ops, before = self.recording.ops, self._now.num_flops
        op = Op(len(ops), Kind.UNIT, name, call=self._calls[name], module=name)
        ops.append(op)
        with self._refusing(op):
            leaves, structure = flatten((args, kwargs))
            before_shadows, leaves = leaves, self._values.shadowed(leaves)
            if leaves is not before_shadows:
                args, kwargs = unflatten(leaves, structure)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        attributes = self._touched.before(name)
        op.given = tuple(attributes)
        op.asked = form((args, kwargs, list(attributes.values())))
        given += tensors_in(list(attributes.values()), [])
        self._calls[name] += 1
        effects, containers = Effects(self._clones, name), Containers((args, kwargs))
        versions = [version_of(each) for each in given]
        self._now.written.clear()
        self._now.begin(op.index, given)
        self.is_inside = True
        try:
            with self.process_draws.elsewhere(), self._within(name), self._draws(name, op.call):
                out = self._real(name, args, kwargs) if name in self._opaque else run(*args, **kwargs)
        finally:
            self.is_inside = False
        op.left = self._touched.after(name)
        bonds.of_unit(ops, op, given, self._now, self._values)
        self._now.begin(op.index)
        out = self._as_values(given, out)
        op.num_flops = self._now.num_flops - before
        op.weights = self._values.weights_among([*given, *weights_of_modules(leaves)])
        written = [each for each, version in zip(given, versions, strict=True) if is_written(each, version)]
        with self._refusing(op):
            self._values.close(op, given, out, self._now.written | set(map(storage_of, written)))
        with self.process_draws.elsewhere():
            again = partial(self._real, name, args, kwargs) if name in self._opaque else None
            plain.note(op, [each.shape for each in given], again)
        for target, path, leaf in effects.found(self._as_value):
            op.effects.append(Effect(target, path, len(op.outputs)))
            self._values.add(op, given, leaf)
        self._note_filled(op, given, containers)
        with self.process_draws.elsewhere():
            uncertain.follow(op, given, args, kwargs, lambda a, k: self._real(name, a, k, variant=1))
        if not any(isinstance(each, Placeholder | Same) for each in op.outputs):
            op.kind = Kind.EVERYWHERE
            self._note_everywhere(op, given, out)
            op.is_state = self._buffers.has_among(given, versions)
        return out

    def _note_filled(self, op: Op, given: list[Tensor], containers: Containers) -> None:
        for where, container, key in containers.new():
            leaves, structure = flatten(container[key])
            leaves, start = [self._as_value(leaf) for leaf in leaves], len(op.outputs)
            container[key] = unflatten(leaves, structure)
            for leaf in leaves:
                self._values.add(op, given, leaf)
            op.filled.append(Filled(where, key, structure, range(start, len(op.outputs))))

    def _as_values(self, given: list[Tensor], out: Any) -> Any:
        """What a unit returned; what it made of real tensors is a value too: other stages have none of it."""
        leaves, structure = flatten(out)
        kept = {id(each) for each in given}
        if not any(isinstance(leaf, Placeholder) and id(leaf) not in kept for leaf in leaves):
            return out
        made = [self._as_value(leaf) if id(leaf) not in kept else leaf for leaf in leaves]
        return unflatten(made, structure)

    def _as_value(self, leaf: Any) -> Any:
        is_real = isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder)
        return Placeholder.like(leaf, self._device) if is_real else leaf

    # Glue.

    def _glue_noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        look()
        with raised(self.recording.ops, self._calls):
            return self._glue(func, args, kwargs)

    def _glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ops, name = self.recording.ops, getattr(func, "__name__", str(func))
        has_draws = name in DRAWS or opaque.may_draw(func, args, are_keyed())
        op = Op(len(ops), Kind.EVERYWHERE, name, func, module=self._stack[-1].name, has_draws=has_draws)
        ops.append(op)
        with self._refusing(op):
            args, kwargs = self._values.shadowed(args), self._values.shadowed(kwargs)
            given = tensors_in((args, kwargs), [])
            before, versions = self._now.num_flops, [version_of(each) for each in given]
            self._now.written.clear()
            self._now.has_read = False
            self._now.begin(op.index)
            check_outside()
            with self._drawing(op), opaque.used_by(func, self._values.shadowed) as used:
                out = func(*args, **kwargs)
            used = [each for each in used if id(each) in self._variable or self._values.is_of_model(each)]
            if not any(isinstance(each, Placeholder) for each in (*given, *used)):
                self._note_everywhere(op, [*given, *used], out)
                op.is_state = self._buffers.has_among(given, versions)
                return out
            op.kind, op.num_flops = Kind.GLUE, self._now.num_flops - before
            op.has_read = self._now.has_read
            check_written(given, self._now.written, self._values, self._units or ())
            op.weights = self._values.weights_among([*given, *used])
            op.is_of_weights = not has_draws and self._values.are_of_weights([*given, *used], self._variable)
            self._values.close(op, given, out, self._now.written, used)
            uncertain.follow(op, [*given, *used], args, kwargs, lambda a, k: func(*a, **k))
            bonds.of_glue(ops, op, (args, kwargs), self._values)
            self._buffers.note_owned(given, self._now.written)
        return out

    def _drawing(self, op: Op) -> AbstractContextManager[Any]:
        if not op.has_draws:
            return nullcontext()
        op.call = self._calls[op.draw_name]
        self._calls[op.draw_name] += 1
        return self._draws(op.draw_name, op.call)

    @contextmanager
    def _refusing(self, op: Op | None = None) -> Iterator[None]:
        """Say of code that needs numbers where it is."""
        try:
            yield
        except (NoNumbers, RuntimeError) as error:
            if not is_about_numbers(error):
                raise
            made = (Unseen if isinstance(error, Unseen) else NoNumbers)(str(error))
            made.stack = [each.name for each in self._stack]  # type: ignore[attr-defined]
            made.op = op  # type: ignore[attr-defined]
            raise made from error

    def _note_everywhere(self, op: Op, given: list[Tensor], out: Any) -> None:
        """Note what depends on the numbers of the model's inputs, and whether Python looked at such numbers."""
        depends = op.has_draws or any(id(each) in self._variable for each in given)
        if not depends or op.func in SHAPES:
            return
        is_write = op.what.endswith("_") or op.what.startswith(("__i", "__setitem__"))
        made = tensors_in(out, [])
        for each in (*made, *(given[:1] if is_write else ())):
            self._variable.add(id(each))
            self._values.keep(each)
        if op.func in READS:
            op.has_read, op.read = True, read(out)
