"""module:function: found, called, and every way of failing said in a sentence."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeloom.errors import ConfigError
from pipeloom.train.config import ModelConfig
from pipeloom.train.factory import build_model, find_factory, num_required

USERS = """
import torch
from torch import nn
from pipeloom.errors import ConfigError

def plain():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

def sized(section):
    return nn.Sequential(nn.Embedding(256, section.width), nn.Linear(section.width, 256))

def optional(width=8, *, depth=1):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(256, 8), nn.Linear(8, 256))

def broken():
    return nn.Linear(-1)

def refusing(section):
    raise ConfigError("this model wants a width of 7")

def greedy(a, b):
    return plain()

def nothing():
    return None

number = 3
"""


@pytest.fixture(autouse=True)
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("users_model.py").write_text(USERS)
    Path("broken_syntax.py").write_text("def f(:\n")
    Path("broken_import.py").write_text("import no_such_library\n")
    yield
    for name in ("users_model", "broken_syntax", "broken_import"):
        sys.modules.pop(name, None)


def build(name: str, seed: int = 0) -> nn.Module:
    return build_model(ModelConfig(factory=name, width=12), seed)


@pytest.mark.parametrize(("name", "width"), [("plain", 8), ("sized", 12), ("optional", 8), ("Model", 8)])
def test_factory_takes_nothing_or_the_section(name: str, width: int) -> None:
    model = build(f"users_model:{name}")
    assert model(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 256)
    assert model[0].weight.shape == (256, width)


def test_weights_follow_from_the_seed() -> None:
    first, again, other = (build("users_model:plain", seed)[0].weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_callers_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    build("users_model:plain", seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_model", "'users_model' is not of the form module:function"),
        ("users_model:", "is not of the form module:function"),
        (":plain", "is not of the form module:function"),
        ("users_model:a b", "is not of the form module:function"),
        ("no_such_module:f", "there is no module 'no_such_module' in "),
        ("users_model.inner:f", "there is no module|cannot be imported"),
        ("users_model:plian", r"module 'users_model' has no function 'plian'\nhint: did you mean 'plain'"),
        ("users_model:number", "module 'users_model' has no function 'number'"),
        ("users_model:nothing", "'users_model:nothing' returned NoneType, no nn.Module"),
        ("users_model:broken", r"'users_model:broken' failed: TypeError: .*\(.*users_model\.py, line 20\)"),
        ("users_model:greedy", r"'users_model:greedy' failed: TypeError: .*missing 1 required"),
        ("users_model:refusing", "^this model wants a width of 7$"),
        ("broken_syntax:f", r"module 'broken_syntax' cannot be imported: SyntaxError"),
        ("broken_import:f", r"'broken_import' cannot be imported: ModuleNotFoundError: .*broken_import\.py, line 1"),
    ],
)
def test_each_failure_has_its_sentence(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name)


def test_users_traceback_is_kept_as_the_cause() -> None:
    with pytest.raises(ConfigError, match="failed: TypeError") as caught:
        build("users_model:broken")
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(("name", "count"), [("plain", 0), ("sized", 1), ("optional", 0), ("greedy", 2), ("Model", 0)])
def test_required_arguments_are_counted(name: str, count: int) -> None:
    assert num_required(find_factory(f"users_model:{name}")) == count
