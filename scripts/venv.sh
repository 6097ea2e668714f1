# Sourced by quickstart.sh and test.sh, with the repository's root as working folder.

make_venv() {
  # .venv of the first Python >= 3.10; it sees the packages of that Python if a fitting torch is among them.
  [ -x .venv/bin/pip ] && return
  local python=""
  for candidate in python3 python python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then
    echo "error: no Python >= 3.10 found (python3 is $(python3 --version 2>&1)); install one" >&2
    exit 1
  fi
  local options=()
  if "$python" -c 'import sys, torch; v = tuple(map(int, torch.__version__.split(".")[:2])); sys.exit(not (2, 6) <= v < (2, 16) or sys.prefix != sys.base_prefix)' 2>/dev/null; then
    options=(--system-site-packages)
  fi
  "$python" -m venv "${options[@]+"${options[@]}"}" .venv
}

install() {
  # pip install into .venv, unless that was done already and the files that say what are as they were.
  local stamp=.venv/installed-"${*//[^a-z]/}"
  if ! cat pyproject.toml requirements*.txt | cmp -s - "$stamp"; then
    .venv/bin/pip install --quiet "$@" || return 1  # `set -e` is off where the caller has a way out
    # Beside a system-wide accelerate pip would make no launcher, and the system's does not see .venv.
    [ -x .venv/bin/accelerate ] || .venv/bin/pip install --quiet --ignore-installed --no-deps "accelerate>=1.0,<2"
    cat pyproject.toml requirements*.txt > "$stamp"
  fi
}
