#!/usr/bin/env bash
# Install what the tests need and run them: bash scripts/test.sh [--slow] [pytest arguments]
# Uses the active virtual environment, else .venv. --slow runs the slow tests too; those marked gpu
# run where there is a CUDA device.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${VIRTUAL_ENV:-}" ]; then
  source scripts/venv.sh
  make_venv
  install requirements-test.txt
  export VIRTUAL_ENV=$PWD/.venv PATH="$PWD/.venv/bin:$PATH"
else
  python -m pip install --quiet -r requirements-test.txt
fi

select=(-m "not slow and not gpu")
if [ "${1:-}" = "--slow" ]; then
  shift
  select=()
fi
ruff check .
ruff format --check .
python -m pytest "${select[@]+"${select[@]}"}" "$@"
