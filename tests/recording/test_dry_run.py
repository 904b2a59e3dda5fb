"""What a dry run sees."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeloom.recording.dry_run import DryRun
from pipeloom.recording.ops import INPUT, Kind, Same, Value
from pipeloom.standins.placeholder import NoNumbers, Placeholder, Unseen

UNITS = ["a", "b", "c"]


class Model(nn.Module):
    """Three units, a parameter and two buffers, and a forward that a test gives."""

    def __init__(self, code):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))
        self.code = code

    def forward(self, *args, **kwargs):
        return self.code(self, *args, **kwargs)


def recorded(code, *args, units=UNITS, opaque=(), **kwargs):
    return DryRun(Model(code), units, set(opaque)).run(args or (torch.ones(2, 4),), kwargs)


def calls(recording):
    return [(op.what, op.kind) for op in recording.ops]


def test_units_and_glue_are_in_the_order_of_calls_with_the_values_between():
    recording = recorded(lambda m, x: m.b(m.a(x) * 2) + m.scale)
    assert [op.what for op in recording.ops] == ["a", "mul", "b", "add"]
    assert [op.inputs for op in recording.ops] == [(), (Value(0, 0),), (Value(1, 0),), (Value(2, 0),)]
    assert recording.ops[3].weights == (("", "scale"),)
    assert recording.results == (Value(3, 0),)


def test_what_depends_on_the_models_inputs_only_runs_everywhere():
    recording = recorded(lambda m, x: m.a(x + 1) * x.sum())
    assert calls(recording) == [
        ("add", Kind.EVERYWHERE),
        ("a", Kind.UNIT),
        ("sum", Kind.EVERYWHERE),
        ("mul", Kind.GLUE),
    ]


def test_an_input_that_requires_a_gradient_is_a_value_of_the_first_stage():
    recording = recorded(lambda m, x: m.a(x) + x, torch.ones(2, 4, requires_grad=True))
    assert recording.grad_inputs == (0,)
    assert recording.ops[1].inputs == (Value(0, 0), Value(INPUT, 0))


def test_the_model_stays_as_it_is():
    model = Model(lambda m, x: m.a(x) + m.calls.add_(1))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    DryRun(model, UNITS, set()).run((torch.ones(2, 4),), {})
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_the_users_inputs_stay_as_they_are_and_writes_into_them_are_known():
    x = torch.ones(2, 4)
    recording = recorded(lambda m, x: m.a(x.add_(1)), x)
    assert recording.written_inputs == (0,)
    assert x.eq(1).all()


def test_a_write_makes_another_value_of_a_tensor_and_of_its_views():
    def code(m, x):
        made = m.a(x)
        view = made[:, :2]
        made.mul_(m.b(x))
        return made, view

    recording = recorded(code)
    write = recording.ops[3]
    assert write.what == "mul_"
    assert write.outputs[0] == Same(0)
    assert write.holders == {1: Value(1, 0)}
    assert recording.results == (Value(3, 0), Value(3, 1))


def test_a_view_that_nothing_uses_after_a_write_is_forgotten():
    def code(m, x):
        made = m.a(x)
        made[:, :2] = m.b(x)[:, :2]
        made[:, :2].add_(1)
        return m.c(made)

    assert all(len(op.holders) <= 1 for op in recorded(code).ops)
    assert all(value.op in (0, 3, 4) for op in recorded(code).ops for value in op.holders.values())


@pytest.mark.parametrize(("columns", "is_other"), [(slice(2, 4), True), (slice(0, 2), False)], ids=["apart", "over"])
def test_a_view_that_does_not_overlap_stays_the_value_that_it_was(columns, is_other):
    def code(m, x):
        made = m.a(x)
        view, other = made[:, columns], made[:, :2]
        other.mul_(2)
        return view

    results = recorded(code).results
    assert (results == (Value(1, 0),)) == is_other


@pytest.mark.parametrize("write", ["whole", "view"])
def test_a_real_tensor_that_a_value_is_written_into_is_a_value_from_there_on(write):
    def code(m, x):
        made = torch.zeros(2, 4)
        if write == "whole":
            made[:, :2] = m.a(x)[:, :2]
        else:
            made[:, :2].copy_(m.a(x)[:, :2])
        made[:, 2:] += 1
        return m.b(made)

    recording = recorded(code)
    assert next(op for op in recording.ops if op.what == "b").inputs
    assert any(op.targets for op in recording.ops)


def test_another_view_of_such_memory_is_refused():
    def code(m, x):
        made = torch.zeros(2, 4)
        view = made[0]
        made[:, :2] = m.a(x)[:, :2]
        return view + 1

    with pytest.raises(Unseen, match="a view of a tensor is used that a value of a stage was written into"):
        recorded(code)


def test_a_unit_that_writes_into_its_real_input_hands_it_on():
    class Writes(nn.Module):
        def forward(self, x):
            x.add_(1)
            return x * 2

    model = Model(lambda m, x: m.c(m.a(x) + m.b(x)))
    model.a = Writes()
    recording = DryRun(model, UNITS, set()).run((torch.ones(2, 4),), {})
    assert recording.written_inputs == (0,)


def test_a_buffer_that_a_value_is_written_into_is_one_stages():
    run = DryRun(Model(lambda m, x: m.average.add_(m.a(x).detach().mean(0)) * m.b(x)), UNITS, set())
    run.run((torch.ones(2, 4),), {})
    assert run.owned == {("", "average")}


def test_a_buffer_that_is_counted_up_is_written_by_every_stage():
    recording = recorded(lambda m, x: m.a(x) * m.calls.add_(1))
    assert recording.written_buffers == (("", "calls"),)
    assert [op.what for op in recording.ops if op.is_state] == ["add_"]


def test_what_the_way_depends_on_is_read_from_the_models_inputs():
    recording = recorded(lambda m, x: m.a(x) if x.sum() > 3 else m.b(x))
    assert recording.has_reads
    assert [op.read for op in recording.ops if op.has_read] == [True]


def test_a_module_that_looks_at_numbers_is_run_for_real_and_whole():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    model, opaque = Model(lambda m, x: m.b(m.a(m.c(x)))), set()
    model.a = Looks(4, 4)
    run = DryRun(model, None, opaque)
    run.run((torch.ones(2, 4),), {})
    assert opaque == {"a"}
    assert [node.name for node in run.tree.children] == ["c", "a", "b"]


def test_code_of_the_model_that_looks_at_numbers_has_a_plan_up_to_there():
    recording = recorded(lambda m, x: m.b(m.a(x)) * m.a(x).sum().item())
    assert [op.what for op in recording.ops] == ["a", "b", "a", "sum"]
    assert "looks at numbers that another stage may have" in str(recording.tail)


def test_a_transform_is_refused_by_name():
    with pytest.raises(Unseen, match="vmap or grad"):
        recorded(lambda m, x: torch.func.vjp(lambda row: row * 2, m.a(x)))


def test_a_tensor_that_left_a_unit_unseen_is_refused():
    left = []

    class Leaves(nn.Linear):
        def forward(self, x):
            left.append(super().forward(x))
            return left[-1] * 2

    model = Model(lambda m, x: m.b(m.a(x)) + left[-1])
    model.a = Leaves(4, 4)
    with pytest.raises(NoNumbers, match="left the unit that made it otherwise than by return"):
        DryRun(model, UNITS, set()).run((torch.ones(2, 4),), {})


def test_a_parameter_that_is_returned_belongs_to_the_last_stage():
    recording = recorded(lambda m, x: (m.a(x), m.scale))
    assert recording.result_weights == (("", "scale"),)
    assert recording.results == (Value(0, 0),)


def test_flops_are_those_of_products():
    recording = recorded(lambda m, x: F.relu(m.a(x)))
    assert [op.num_flops for op in recording.ops] == [2 * 2 * 4 * 4, 0]
    assert not any(isinstance(each, Placeholder) and each.is_leaf for op in recording.ops for each in op.outputs)
