"""`make` and the script that builds the environment, with interpreters that only pretend."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PRETENDER = """#!/bin/sh
# Answers as Python {version} would; makes a .venv whose Python is a copy of itself.
case "$*" in
  *version_info*) exit {too_old} ;;
  *sys.version*) echo {version} ;;
  "-m venv --clear .venv") [ -z "{no_venv}" ] || exit 1; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m pip install"*) echo "$@" >> pip.log ;;
esac
"""


def pretend(folder: Path, *, version: str, too_old: bool = False, no_venv: str = "") -> Path:
    """Put a pretending ``python3`` into ``folder``."""
    path = folder / "python3"
    path.write_text(PRETENDER.format(version=version, too_old=int(too_old), no_venv=no_venv))
    path.chmod(0o755)
    return path


def make_venv(folder: Path, target: str = ".", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script in ``folder`` with only the pretenders and the shell's own tools on the path."""
    command = ["sh", str(ROOT / "tools" / "make_venv.sh"), target]
    path = f"{folder}:/usr/bin:/bin"
    return subprocess.run(command, cwd=folder, env={"PATH": path, **env}, capture_output=True, text=True, check=False)


def test_an_old_python_is_named_with_a_way_out(tmp_path: Path) -> None:
    python = pretend(tmp_path, version="3.9.18", too_old=True)
    ran = make_venv(tmp_path, PYTHON=str(python))
    assert ran.returncode == 2
    assert f"error: {python} is 3.9.18; Pipeloom needs Python 3.11 or newer" in ran.stderr
    assert "hint: install one, or name it: make PYTHON=" in ran.stderr


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    ran = make_venv(tmp_path, PYTHON="python9.9")
    assert ran.returncode == 2
    assert "error: python9.9 is not installed" in ran.stderr


def test_a_python_that_cannot_make_environments_is_told_so(tmp_path: Path) -> None:
    pretend(tmp_path, version="3.12.1", no_venv="yes")
    ran = make_venv(tmp_path)
    assert ran.returncode == 2
    assert "hint: on Debian and Ubuntu: apt install python3-venv" in ran.stderr


def test_pip_installs_the_target_under_the_constraints(tmp_path: Path) -> None:
    pretend(tmp_path, version="3.12.1")
    assert make_venv(tmp_path, ".[dev]").returncode == 0
    assert (tmp_path / "pip.log").read_text().endswith("-c requirements/ci.txt -e .[dev]\n")


def test_a_working_environment_is_kept(tmp_path: Path) -> None:
    pretend(tmp_path, version="3.12.1")
    make_venv(tmp_path)
    (tmp_path / ".venv" / "kept").touch()
    assert make_venv(tmp_path).returncode == 0
    assert (tmp_path / ".venv" / "kept").exists()


def planned(*arguments: str) -> list[str]:
    """The commands that make would run, were the environment up to date."""
    up_to_date = ["-o", ".venv/.installed-dev", "-o", ".venv/.installed-run"]
    command = ["make", "--dry-run", "--no-print-directory", *up_to_date, *arguments]
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_train_passes_flags_on() -> None:
    assert planned("train", "ARGS=--train.steps 3") == [".venv/bin/pipeloom train --train.steps 3"]


@pytest.mark.parametrize("check", ["ruff check", "ruff format --check", "mypy", "lint-imports", "tools.guard_rails"])
def test_lint_runs_every_check(check: str) -> None:
    assert any(check in command for command in planned("lint"))


def test_tests_are_the_last_command_of_make_test() -> None:
    assert " -m pytest -n 2 " in planned("test")[-1]
    assert "OMP_NUM_THREADS=1" in planned("test")[-1]


def test_bare_make_lists_the_targets() -> None:
    ran = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = [line.split()[1] for line in ran.stdout.splitlines()]
    assert named == ["venv", "train", "test", "test-zoo", "lint", "bench"]


def test_constraints_pin_torch_and_name_no_host() -> None:
    lines = (ROOT / "requirements" / "ci.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert not [pin for pin in pins if not pin.replace("-", "_").replace("==", "").replace(".", "").isidentifier()]


MAKE = """#!/bin/sh
# Stands in for make: says what it was asked, and fails at the targets named in $FAILS.
shift
[ "$1" = test ] && echo "== 3 passed in 0.01s =="
[ "$1" = test ] || echo "make $1"
case " $FAILS " in *" $1 "*) echo "make: *** [Makefile:1: $1] Error 1" >&2; exit 2 ;; esac
"""


def ci(folder: Path, fails: str = "") -> subprocess.CompletedProcess[str]:
    """Run `.ci/run` with a make that only pretends."""
    (folder / "make").write_text(MAKE)
    (folder / "make").chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "FAILS": fails}
    return subprocess.run([str(ROOT / ".ci" / "run")], env=env, capture_output=True, text=True, check=False)


def test_ci_ends_with_the_summary_of_the_tests(tmp_path: Path) -> None:
    ran = ci(tmp_path)
    assert ran.stdout.splitlines() == ["make venv", "make lint", "make test-zoo", "== 3 passed in 0.01s =="]
    assert ran.returncode == 0


@pytest.mark.parametrize("fails", ["lint", "test", "test-zoo", "lint test"])
def test_ci_fails_with_any_part_and_still_ends_with_the_tests(fails: str, tmp_path: Path) -> None:
    ran = ci(tmp_path, fails)
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1] == "== 3 passed in 0.01s =="


def test_ci_stops_without_an_environment(tmp_path: Path) -> None:
    ran = ci(tmp_path, "venv")
    assert ran.returncode == 1
    assert ran.stdout.splitlines() == ["make venv"]
