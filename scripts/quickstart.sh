#!/usr/bin/env bash
# From nothing to samples: makes .venv, installs this checkout into it, trains on the embedded digits.
# Run it again and it goes on where it stopped. Arguments go to train.py, e.g. model=dit.
set -euo pipefail
if [[ "${1:-}" =~ ^(-h|--help)$ ]]; then
  sed -n '2,/^[^#]/ s/^# //p' "${BASH_SOURCE[0]}"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
SECONDS=0

make_venv
install -e . 2>/dev/null || install -r requirements.txt  # the second where no index has setuptools to build with
echo "installed after ${SECONDS} s; training"
.venv/bin/python train.py model=tread "$@"
echo "done after ${SECONDS} s, in $PWD"
