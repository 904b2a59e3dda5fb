import json

import pytest

from pipeloom.cost import Costs, read_costs
from pipeloom.errors import CostError

GOOD = {"forward_s": [1.0, 2.0], "input_grad_s": 1, "weight_grad_s": 0.5}


@pytest.fixture
def written(tmp_path):
    """Write a costs file and return its path."""

    def write(content, name="costs.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


def test_json(written):
    path = written({**GOOD, "transfer_s": 0.25, "bytes_held_to_input_grad": [7, 9]})
    assert read_costs(path, 2) == Costs(
        (1.0, 2.0), (1.0, 1.0), (0.5, 0.5), transfer_s=0.25, bytes_held_to_input_grad=(7, 9)
    )


def test_toml(written):
    text = "forward_s = [1.0, 2.0]\ninput_grad_s = 1\nweight_grad_s = 0.5\nbytes_held_to_weight_grad = 3\n"
    costs = read_costs(written(text, "costs.toml"), 2)
    assert (costs.forward_s, costs.bytes_held_to_weight_grad) == ((1.0, 2.0), (3, 3))


def test_bandwidth(written):
    costs = read_costs(written({**GOOD, "transfer_bytes_per_s": 1e9, "boundary_bytes": 4096}), 2)
    assert (costs.transfer_bytes_per_s, costs.boundary_bytes) == (1e9, (4096,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"foward_s": 1.0}, r"has the key 'foward_s', which is unknown\nhint: did you mean 'forward_s'"),
        ({"zzzzzz": 1.0}, r"has the key 'zzzzzz', which is unknown\nhint: the keys are forward_s"),
        ({"forward_s": [1.0]}, "forward_s has 1 values for 2 stages"),
        ({"forward_s": [1.0, -2.0]}, "forward_s holds -2; a finite number of at least 0 is needed"),
        ({"forward_s": float("nan")}, "forward_s holds nan; a finite number of at least 0 is needed"),
        ({"forward_s": "1"}, "forward_s holds '1'; a number or a list of numbers, one per stage, is needed"),
        ({"forward_s": ["1", 2]}, "forward_s holds '1'; a number is needed"),
        ({"forward_s": {"0": 1}}, "forward_s holds .*; a number or a list of numbers"),
        ({"forward_s": None}, "forward_s holds None; a number or a list of numbers"),
        ({"forward_s": True}, "forward_s holds True; a number or a list of numbers"),
        ({"transfer_s": [0.1, 0.1]}, "transfer_s holds a list; it is one number for every transfer"),
        ({"bytes_held_to_input_grad": 0.5}, "bytes_held_to_input_grad holds 0.5; a whole number"),
    ],
)
def test_wrong_values_are_refused(written, changes, message):
    path = written({**GOOD, **changes})
    with pytest.raises(CostError, match=message) as caught:
        read_costs(path, 2)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("missing", GOOD)
def test_missing_keys_are_named(written, missing):
    path = written({key: value for key, value in GOOD.items() if key != missing})
    with pytest.raises(CostError, match=f"lacks {missing}\nhint: needed are forward_s input_grad_s"):
        read_costs(path, 2)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{", "costs.json", "is not JSON"),
        ("forward_s = 1", "costs.json", "is not JSON.*\nhint: name a TOML file"),
        ("forward_s = ", "costs.toml", "is not TOML"),
        ("[1, 2]", "costs.json", "holds a list; keys with costs are needed"),
        ("[" * 100_000, "costs.json", "is not JSON"),
    ],
    ids=["cut-off", "toml-as-json", "half-a-line", "list", "too-deep"],
)
def test_other_content_is_refused(written, content, name, message):
    path = written(content, name)
    with pytest.raises(CostError, match=message):
        read_costs(path, 2)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CostError, match=r"costs file '.*nowhere.json' does not exist"):
        read_costs(tmp_path / "nowhere.json", 2)


def test_folder_is_refused(tmp_path):
    with pytest.raises(CostError, match="cannot be read"):
        read_costs(tmp_path, 2)


def test_other_encoding_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(CostError, match="cannot be read: 'utf-8' codec"):
        read_costs(path, 2)
