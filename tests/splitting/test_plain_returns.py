"""Numbers, flags and text that a unit returns, and that another stage's code uses.

The story: a layer returned ``x, x.mean().item()``, and the last lines of the model scaled by the first layer's number.
The dry run had made that number of numbers that were made up; every stage but the layer's own went on with it, and
loss and gradients were wrong without a word. Only tensors travel, so what depends on numbers of the batch, or changes
from call to call, is refused where another stage would use it.
"""

import re

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import UncuttableCode
from tests.splitting.test_strange_glue import assert_like_plain, square


class Says(nn.Module):
    """A layer that returns something besides."""

    def __init__(self, says):
        super().__init__()
        self.linear, self.says, self.num_calls = nn.Linear(8, 8), says, 0

    def forward(self, x):
        x = self.linear(x).tanh()
        self.num_calls += 1
        return x, self.says(self, x)


class Model(nn.Module):
    def __init__(self, says, use, which):
        super().__init__()
        self.layers, self.use, self.which = nn.ModuleList(Says(says) for _ in range(6)), use, which

    def forward(self, x):
        said = []
        for layer in self.layers:
            x, more = layer(x)
            said.append(more)
        return self.use(x, said[self.which])


def number(layer, x):
    return x.mean().item()


def count_of(layer, x):
    return (x[0] > 0).nonzero().shape[0]


def flag(layer, x):
    return bool(x.mean() > 0)


def text(layer, x):
    return "more" if x.mean() > 0 else "less"


def calls(layer, x):
    return layer.num_calls


def scaled(x, k):
    return x * (1 + k)


def chosen(x, k):
    return x * (2.0 if k else 3.0)


def compared(x, k):
    return x * (2.0 if k == "more" else 3.0)


def multiplied(x, k):
    return torch.mul(x, k)


def train(model):
    """Some steps: numbers may agree with those of the dry run by chance."""
    with pl.Pipeline(model, num_stages=3, num_microbatches=4, loss_fn=square) as pipe:
        for _ in range(8):
            pipe.step(torch.randn(8, 8))


CASES = [(number, scaled), (number, multiplied), (count_of, scaled), (flag, chosen), (text, compared), (calls, scaled)]


@pytest.mark.parametrize(("says", "use"), CASES)
def test_what_depends_on_numbers_is_refused_where_another_stage_would_use_it(says, use):
    torch.manual_seed(0)
    said = r"'layers\.\d'.* returned .*(only tensors travel|only its stage has it)"
    with pytest.raises(UncuttableCode, match=said) as caught:
        train(Model(says, use, 0))
    assert re.search(r"return (it as )?a tensor", caught.value.hint)


@pytest.mark.parametrize(("says", "use"), [(number, scaled), (flag, chosen)])
def test_what_depends_on_numbers_may_be_used_in_the_stage_that_has_it(says, use):
    assert_like_plain(lambda: Model(says, use, -1), num_stages=3)


def test_a_number_that_nobody_uses_may_depend_on_numbers():
    assert_like_plain(lambda: Model(number, lambda x, k: x, 0), num_stages=3)


def test_what_depends_on_shapes_may_be_used_anywhere():
    assert_like_plain(lambda: Model(lambda layer, x: (x.shape[1], "a", 0.5, True), lambda x, k: x * k[0], 0), 3)


def test_a_list_that_grows_with_numbers_is_refused():
    """The recorded places of its tensors would be those of others."""
    model = Model(lambda layer, x: [x] * count_of(layer, x), lambda x, k: x + sum(k), 0)
    with pytest.raises(UncuttableCode, match=r"'layers\.\d' .*returned \d+ values"):
        train(model)


def selected(layer, x):
    return x[x > 0]


class Doubled(nn.Module):
    """Makes something of a tensor of such a shape, and asks that for its own."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = Says(selected), nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        x, more = self.first(x)
        more = more * 2
        for layer in self.rest:
            x = layer(x)
        return x / (1 + len(more))


def test_a_shape_that_depends_on_numbers_is_refused_where_another_stage_would_ask_for_it():
    """The dry run has one of numbers that were made up, and the last stage would have divided by that."""
    with pytest.raises(UncuttableCode, match=r"test_plain_returns.py:\d+: .*the shape of .* depends on numbers"):
        train(Model(selected, lambda x, k: x / (1 + k.shape[0]), 0))
    with pytest.raises(UncuttableCode, match=r"the shape of .* depends on numbers"):
        train(Doubled())


def test_a_tensor_whose_shape_depends_on_numbers_may_be_used_anywhere():
    assert_like_plain(lambda: Model(selected, lambda x, k: x * k.sum(), 0), num_stages=3)


def kept(layer, x):
    return x[x > 0][:, None] * x[0]


def loose(use):
    """A model whose first layer selects rows; ``made`` of them is asked for its shape in the last stage."""

    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = Says(kept), nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x):
            x, rows = self.first(x)
            made = use(self, x, rows)
            for layer in self.rest:
                x = layer(x)
            return x / (1 + made.numel())

    return Loose


UNCERTAIN = {
    "transposed": lambda model, x, rows: rows.t(),
    "of one row": lambda model, x, rows: rows.flatten().unsqueeze(0),
    "expanded": lambda model, x, rows: x[:1, :1].expand_as(rows),
    "broadcast": lambda model, x, rows: torch.broadcast_tensors(x[:1], rows)[0],
    "the first two": lambda model, x, rows: rows[:2],
    "a product": lambda model, x, rows: model.rest[0].weight @ rows.t(),
    "a unit's": lambda model, x, rows: model.rest[0](rows).t(),
    "concatenated": lambda model, x, rows: torch.cat([x, rows]),
    "written into": lambda model, x, rows: rows.t().mul_(2),
}
CERTAIN = {
    "a number": lambda model, x, rows: rows.sum(),
    "a sum over rows": lambda model, x, rows: rows.sum(0),
    "the longest of rows": lambda model, x, rows: torch.cat([rows, x]).amax(0),
    "added": lambda model, x, rows: torch.zeros_like(x).index_add(0, torch.zeros_like(rows[:, 0]).long(), rows),
    "added in place": lambda model, x, rows: torch.zeros_like(x).index_add_(
        0, torch.zeros_like(rows[:, 0]).long(), rows
    ),
    "a matrix": lambda model, x, rows: rows.t() @ rows,
    "a unit's": lambda model, x, rows: model.rest[0](rows.sum(0)),
}


@pytest.mark.parametrize("which", UNCERTAIN)
def test_what_is_made_of_a_tensor_of_an_uncertain_shape_is_uncertain_too(which):
    """Only where the first dimension kept its size was it known: ``rows.t().shape[1]`` was that of the dry run."""
    with pytest.raises(UncuttableCode, match=r"the shape of .* depends on numbers"):
        train(loose(UNCERTAIN[which])())


@pytest.mark.parametrize("which", CERTAIN)
def test_what_has_the_same_shape_whatever_the_number_of_rows_may_be_asked_for_it(which):
    assert_like_plain(loose(CERTAIN[which]), num_stages=3)


class Pools(nn.Module):
    """Makes one row of many, by code that looks at how many there are."""

    def forward(self, rows):
        return rows.new_zeros(rows.shape[0], 8).add(rows).sum(0, keepdim=True) / max(1, rows.shape[0])


def test_a_unit_that_makes_one_row_of_many_returns_a_certain_shape():
    class Model(loose(lambda model, x, rows: model.pools(rows))):
        def __init__(self):
            super().__init__()
            self.pools = Pools()

    assert_like_plain(Model, num_stages=3)
