#!/usr/bin/env bash
# Install what the tests need and run them, on all cores: bash scripts/test.sh [--slow] [pytest arguments]
# Uses the active virtual environment, else .venv. --slow runs the slow tests too, one after the other; those
# marked gpu run where there is a CUDA device.
set -euo pipefail
if [[ "${1:-}" =~ ^(-h|--help)$ ]]; then
  sed -n '2,/^[^#]/ s/^# //p' "${BASH_SOURCE[0]}"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${VIRTUAL_ENV:-}" ]; then
  source scripts/venv.sh
  make_venv
  install -e ".[import,test]"
  export VIRTUAL_ENV=$PWD/.venv PATH="$PWD/.venv/bin:$PATH"
else
  python -m pip install --quiet -r requirements.txt -r requirements-import.txt -r requirements-tensorboard.txt \
    -r requirements-alignment.txt -r requirements-emoji.txt -r requirements-lora.txt -r requirements-test.txt
fi

select=(-m "not slow and not gpu" -n auto --dist loadfile --no-loadscope-reorder)
if [ "${1:-}" = "--slow" ]; then
  shift
  select=()
fi
ruff check .
ruff format --check .
python -m pytest "${select[@]+"${select[@]}"}" "$@"
