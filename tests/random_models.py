"""Random models: units of many kinds, and a parent's code that does with their outputs what people's code does."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.batch.trees import flatten

WIDTH = 6


@dataclass
class Output:
    """What models return as a dataclass."""

    hidden: Any
    aux: Any = None
    more: Any = None


class Answers(nn.Module):
    """Returns a dict of everything: a gradient, none, integers, booleans, plain values, nested containers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other=None, *, flag=True):
        hidden = torch.tanh(self.first(x))
        if other is not None:
            hidden = hidden + self.second(other)
        pair = (hidden * 2, [hidden.detach()])
        return {"hidden": hidden, "index": hidden.argmax(-1), "mask": hidden > 0, "none": None, "n": 3, "pair": pair}


class Passes(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        mean = given.hidden.mean()
        return Output(
            torch.sin(self.inner(given.hidden)), mean if given.aux is None else given.aux + mean, [given.hidden]
        )


class Remembers(nn.Module):
    """Writes its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.training:
            self.count += 1
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.tanh(self.inner(x)) + self.average


class Routes(nn.Module):
    """A mixture of experts: its shapes depend on numbers."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]))
        return out + x


class WritesInput(nn.Module):
    """Writes into what it is given."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x.mul_(0.5)
        return x + self.inner(x) * 0.1


class Block(nn.Module):
    """A parent: glue, parameters of its own in lists and dicts, a method that is no forward, ``self.x = …``."""

    def __init__(self, random):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))])
        self.named = nn.ParameterDict({"key": nn.Parameter(torch.ones(WIDTH))})
        self.chance = random.choice([0.0, 0.2])

    def encode(self, x):
        return self.first(self.norm(x))

    def forward(self, x):
        hidden = F.dropout(torch.tanh(self.encode(x)), self.chance, self.training)
        hidden = self.drop(self.second(hidden)) * self.scales[0] + self.scales[1] * self.named["key"]
        self.last = hidden
        return x + hidden


class Recurs(nn.Module):
    """Keeps its weights in a list of its own as well."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.inner = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return self.inner(x.unsqueeze(1))[0].squeeze(1)


KINDS = {
    "linear": lambda _: nn.Linear(WIDTH, WIDTH),
    "norm": lambda _: nn.LayerNorm(WIDTH),
    "batchnorm": lambda _: nn.BatchNorm1d(WIDTH),
    "dropout": lambda _: nn.Dropout(0.2),
    "chain": lambda _: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "block": Block,
    "remembers": lambda _: Remembers(),
    "routes": lambda _: Routes(),
    "writes": lambda _: WritesInput(),
    "identity": lambda _: nn.Identity(),
    "recurs": lambda _: Recurs(),
}


@dataclass
class Call:
    """What an operation of a parent's code may use."""

    model: Any
    name: str
    a: Tensor
    b: Tensor
    c: Tensor
    number: int
    aux: list
    ids: Tensor
    pad: Any
    flag: bool


def _chunked(call):
    first, second = torch.cat([call.a, call.b], -1).chunk(2, -1)
    return first - second * 0.5


def _set(call):
    out = call.a.clone()
    out[:, 0] = call.b[:, 1]
    out[:, 1:3] *= 2
    return out


def _filled(call):
    out = torch.zeros_like(call.a) if call.number % 2 else torch.zeros(call.a.shape[0], WIDTH)
    out[:, 2:] += call.c[:, 2:]
    out[:, :2] = call.b[:, :2]
    return out


def _written_view(call):
    out = call.a.clone()
    view = out[:, :2]
    view.mul_(2)
    view += 1
    return out


def _looped(call):
    out = 0
    for part in call.a.split(2, -1):
        out = out + F.pad(part, (0, WIDTH - 2))
    return out


def _answered(call):
    found = call.model.answers(call.a, other=call.b if call.number % 2 else None, flag=call.flag)
    chosen = torch.where(found["mask"], found["hidden"], found["pair"][0])
    return chosen + found["pair"][1][0] + call.model.table[found["index"]] * found["n"]


def _passed(call):
    found = Output(call.a)
    for each in call.model.passes:
        found = each(found)
    call.aux.append(found.aux)
    return found.hidden + found.more[0]


def _branched(call):
    out = call.a * 2 if call.pad is not None and call.pad.all() else call.a + call.b
    return out - 0.1 * call.c if call.ids.max() > 8 else out


def _averaged(call):
    if call.model.training:
        call.model.average.mul_(0.9).add_(call.a.detach().mean(0), alpha=0.1)
    return call.a + call.model.average


def _counted(call):
    call.model.calls += 1
    return call.a * call.model.calls.clamp(max=2)


def _checkpointed(call):
    def run(x, y, name=call.name):
        return torch.tanh(call.model.units[name](x) + y)

    if not call.model.training:
        return run(call.a, call.b)
    return checkpoint(run, call.a, call.b, use_reentrant=bool(call.number % 2))


def _with_weights(call):
    weight = call.model.head.weight
    return torch.tanh(F.linear(F.linear(call.a, weight), weight.t()))


def _noted(call):
    call.aux.append(call.a.mean())
    return call.a


def _untracked(call):
    with torch.no_grad():
        return call.a * 2


OPERATIONS = {
    "add": lambda call: call.a + call.b,
    "multiply": lambda call: torch.tanh(call.a * call.b),
    "chunk": _chunked,
    "add in place": lambda call: call.a.clone().add_(call.b),
    "set": _set,
    "fill": _filled,
    "view": lambda call: call.a.view(-1, 2, 3).transpose(1, 2).reshape(-1, WIDTH),
    "write into a view": _written_view,
    "loop": _looped,
    "drop": lambda call: F.dropout(call.a, 0.1, call.model.training),
    "parameter": lambda call: call.a * call.model.scales[call.number % 3],
    "weights of a unit": _with_weights,
    "where": lambda call: torch.where(call.a > call.b, call.b, call.c * 0.5),
    "index": lambda call: call.model.embedding(call.a.argmax(-1)) + call.b,
    "detach": lambda call: call.a.detach() * call.b,
    "no gradient": lambda call: _untracked(call) + call.b,
    "answers": _answered,
    "passes": _passed,
    "branch": _branched,
    "flag": lambda call: call.a if call.flag else call.a * call.b,
    "note": _noted,
    "average": _averaged,
    "count": _counted,
    "einsum": lambda call: torch.tanh(torch.einsum("bi,bj->bij", call.a, call.b).sum(-1)),
    "checkpoint": _checkpointed,
    "again": lambda call: torch.tanh(call.model.units[call.name](call.a.clone())),
    "token": lambda call: torch.cat([call.model.token.expand(1, -1), call.a])[1:] + call.model.token,
    "stack": lambda call: torch.stack([call.a, call.b, call.c]).mean(0),
    "mean": lambda call: call.a + call.b.mean(0, keepdim=True),
    "copy": lambda call: torch.tanh(call.b).clone().copy_(call.a),
}  # fmt: skip


class RandomModel(nn.Module):
    """A random program over random units.

    Args:
        random: makes all choices.
        operations: names of `OPERATIONS` that it may use.
    """

    def __init__(self, random: Random, operations=tuple(OPERATIONS)):
        super().__init__()
        names = [f"{random.choice(list(KINDS))}{i}" for i in range(random.randint(3, 7))]
        self.units = nn.ModuleDict({name: KINDS[name.rstrip("0123456789")](random) for name in names})
        self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.answers, self.passes = Answers(), nn.ModuleList([Passes(), Passes()])
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(WIDTH) * 0.1 + 1) for _ in range(3)])
        self.token, self.unused = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.randn(11, WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        linear = [name for name in names if name.startswith("linear")]
        if len(linear) > 1:
            self.units[linear[0]].weight = self.units[linear[1]].weight
        if random.random() < 0.5:
            self.head.weight = self.embedding.weight
        self.program, todo = [], list(names)
        while todo or random.random() < 0.6:
            what = todo.pop(0) if todo and random.random() < 0.6 else random.choice(operations)
            num_values = len(self.program) + 2
            places = [random.choice([num_values - 1, random.randrange(num_values)]) for _ in range(3)]
            self.program.append((what, random.choice(names), *places))
        self.form = random.choice(["tensor", "dict", "tuple", "dataclass", "loss"])
        self.kept = [random.randrange(len(self.program) + 2) for _ in range(2)]

    @property
    def draws(self):
        """Whether there are random draws, or a checkpoint that updates statistics twice without a pipeline."""
        return any(step[0] in ("drop", "checkpoint") for step in self.program) or any(
            isinstance(each, nn.Dropout) for each in self.modules()
        )

    def forward(self, ids, x=None, *, pad=None, flag=True, extra=None):
        values = [self.embedding(ids), self.embedding(ids) * 0.1 if x is None else x.clone()]
        aux = []
        for what, name, i, j, k in self.program:
            if what in self.units:
                values.append(self.units[what](values[i].clone() if what.startswith("writes") else values[i]))
            else:
                call = Call(self, name, values[i], values[j], values[k], k, aux, ids, pad, flag)
                values.append(OPERATIONS[what](call))
        kept = [values[i] for i in self.kept]
        if extra is not None:
            kept[0] = kept[0] + extra["bias"].unsqueeze(-1)
        return self._result(ids, self.head(sum(kept) + values[-1]), kept, sum(aux) if aux else None)

    def _result(self, ids, logits, kept, aux):
        made = {
            "tensor": lambda: logits,
            "dict": lambda: {"logits": logits, "aux": aux, "hidden": kept, "none": None, "n": 2},
            "tuple": lambda: (logits, (kept[0], None, aux)),
            "dataclass": lambda: Output(logits, aux, (kept[1],)),
            "loss": lambda: {
                "loss": F.cross_entropy(logits, ids) + (0 if aux is None else 0.1 * aux),
                "logits": logits,
            },
        }
        return made[self.form]()


def tensors(value):
    """The floating tensors of an output."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def score(output):
    """A loss of any output."""
    return sum((torch.tanh(each) ** 2).mean() for each in tensors(output))


def random_inputs(random: Random, num_rows: int):
    """Keyword arguments for `RandomModel`."""
    inputs: dict[str, Any] = {"ids": torch.randint(0, 11, (num_rows,))}
    if random.random() < 0.5:
        inputs["x"] = torch.randn(num_rows, WIDTH)
    if random.random() < 0.6:
        inputs["pad"] = torch.rand(num_rows) < 0.5
        inputs["pad"][: num_rows // 2] = True
    if random.random() < 0.5:
        inputs["extra"] = {"bias": torch.randn(num_rows), "none": None}
    if random.random() < 0.5:
        inputs["flag"] = False
    return inputs
