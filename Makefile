# Each target first makes what it needs; a second call is instant (stamp files in .venv).
#   make venv     .venv with everything for development
#   make train    train a small GPT through a two-stage pipeline     ARGS="--train.steps 50"
#   make test     every test, with coverage                          ARGS="-k verify"
#   make test-zoo 30 real models, in .venv-zoo                       ARGS="-k llama"
#   make lint     style, types, arrows between rooms, guard rails, lines per file
#   make bench    the benchmarks
# PYTHON=…  the interpreter to build .venv with (3.11 or newer)
# USE_UV=1  install with uv instead of pip (docs/decisions/0006-pip-over-uv.md says why it is not the default)

BIN := .venv/bin
REQUIREMENTS := pyproject.toml requirements/ci.txt tools/make_venv.sh
ARGS ?=

.PHONY: help venv train test test-zoo lint bench
.NOTPARALLEL:

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

.venv/.installed-run: $(REQUIREMENTS)
	@sh tools/make_venv.sh .
	@touch $@

.venv/.installed-dev: $(REQUIREMENTS)
	@sh tools/make_venv.sh '.[dev]'
	@touch $@ .venv/.installed-run

venv: .venv/.installed-dev

train: .venv/.installed-run
	$(BIN)/pipeloom train $(ARGS)

test: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered $(ARGS)

.venv-zoo/.installed: pyproject.toml requirements/zoo.txt tools/make_zoo_venv.sh | .venv/.installed-run
	@sh tools/make_zoo_venv.sh
	@touch $@

test-zoo: .venv-zoo/.installed
	OMP_NUM_THREADS=1 .venv-zoo/bin/python -m pytest -n 2 tests/zoo $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.lines
	$(BIN)/python -m tools.guard_rails

bench: .venv/.installed-run
	@set -e; for file in benchmarks/[a-z]*.py; do name=$$(basename $$file .py); \
	  echo "== benchmarks.$$name"; OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$name $(ARGS); done
