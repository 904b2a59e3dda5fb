#!/bin/sh
# Make .venv from the first Python that is new enough, and install a target such as . or '.[dev]' into it.
# A bare `python3 -m venv` on an old Python fails minutes later inside pip, with a message about torch.
set -eu

target=${1:?usage: make_venv.sh TARGET}
constraints=requirements/ci.txt

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
works() { is_new_enough "$1" && "$1" -m pip --version >/dev/null 2>&1; }

if ! works .venv/bin/python; then
  found=
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if is_new_enough "$candidate"; then found=$candidate; break; fi
  done
  if [ -z "$found" ]; then
    given=${PYTHON:-python3}
    version=$("$given" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null || echo "not installed")
    echo "error: $given is $version; Pipeloom needs Python 3.11 or newer (it reads TOML and notes exceptions)" >&2
    echo "hint: install one, or name it: make PYTHON=/path/to/python3.11" >&2
    exit 2
  fi
  if ! "$found" -m venv --clear .venv; then
    echo "error: $found cannot make a virtual environment" >&2
    echo "hint: on Debian and Ubuntu: apt install python3-venv" >&2
    exit 2
  fi
fi

echo "installing $target into .venv (versions: $constraints)"
if [ -n "${USE_UV:-}" ]; then
  UV_FIND_LINKS="${PIP_FIND_LINKS:-}" uv pip install --quiet --python .venv/bin/python -c "$constraints" -e "$target"
else
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" -e "$target"
fi
