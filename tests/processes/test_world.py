"""Threads or processes: what the environment says, and what is asked for."""

import pytest
from torch import nn

import pipeloom as pl
from pipeloom.errors import ProcessError
from pipeloom.processes import find_world


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("place", ["auto", "local"])
def test_ranks_are_threads_where_there_is_one_process(place):
    assert find_world(place) is None


def test_one_process_of_a_launcher_has_threads(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert find_world("auto") is None


def test_processes_that_were_asked_for_have_to_be_there():
    with pytest.raises(
        ProcessError, match=r"there is 1 process; a rank needs one each[^$]*hint: start it with: torchrun"
    ):
        find_world("distributed")


def test_threads_that_were_asked_for_whatever_the_launcher_says(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("RANK", "3")
    with pl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], transport="local") as pipe:
        assert (pipe.group.rank, pipe.group.num_ranks) == (0, 1)
        assert pipe.layout["stages"] == {0: ["0.weight", "0.bias"], 1: ["1.weight", "1.bias"]}


def test_a_transport_that_does_not_exist_is_refused():
    with pytest.raises(ProcessError, match=r"transport='thread' was given; one of 'auto', 'local', 'distributed'"):
        pl.Pipeline([nn.Linear(2, 2)], transport="thread")
