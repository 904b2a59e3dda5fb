#!/bin/sh
# Make .venv-zoo: the package beside the model libraries of tests/zoo, with .venv's Python.
# An environment of its own: PyPI's torchvision does not load beside torch's CPU build, and transformers, which probes
# for it, would break in .venv too.
set -eu

pins=requirements/zoo.txt

if ! .venv-zoo/bin/python -m pip --version >/dev/null 2>&1; then
  .venv/bin/python -m venv --clear .venv-zoo
fi

echo "installing the zoo into .venv-zoo (versions: $pins; about 2 GB)"
if [ -n "${USE_UV:-}" ]; then
  UV_FIND_LINKS="${PIP_FIND_LINKS:-}" uv pip install --quiet --python .venv-zoo/bin/python -r "$pins" -e .
else
  .venv-zoo/bin/python -m pip install --quiet --disable-pip-version-check -r "$pins" -e .
fi
