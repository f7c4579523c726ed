# Sourced by quickstart.sh and test.sh, from the root of the repository.
#
# prepare_environment FILE... leaves a .venv of Python 3.11 that holds the pins
# of every FILE, and returns at once where it does already. .venv/installed
# keeps a copy of each file as it was installed. It is removed before pip starts
# and written when pip has ended, so a .venv without it was cut short (or is
# somebody else's) and is made anew: pip takes half a package for a whole one.
# Scripts that start together wait for one another (on Linux, by flock).

prepare_environment() {
  is_installed "$@" && return
  (
    if command -v flock > /dev/null; then flock 9; fi
    is_installed "$@" || install "$@"
  ) 9< requirements.txt
}

is_installed() {
  local file
  [[ -x .venv/bin/python ]] || return 1
  for file in "$@"; do
    cmp -s "$file" ".venv/installed/$file" || return 1
  done
}

install() {
  local file arguments=()
  if [[ ! -d .venv/installed ]] || ! is_python_311 .venv/bin/python; then
    make_environment || return 1
  fi
  for file in "$@"; do
    arguments+=(-r "$file")
  done
  echo "Installing $* into .venv (once, about a minute)." >&2
  rm -rf .venv/installed
  # Twice quiet: errors are shown, warnings about mirrors and the like are not.
  if ! .venv/bin/python -m pip install --quiet --quiet \
    --disable-pip-version-check "${arguments[@]}"; then
    echo "error: pip could not install $*; its reason is above." >&2
    return 1
  fi
  mkdir .venv/installing
  cp "$@" .venv/installing/
  mv .venv/installing .venv/installed
}

make_environment() {
  local python
  python="$(find_python)" || return 1
  if ! "$python" -m venv --clear .venv; then
    echo "error: $python cannot make .venv (on Debian: install" \
      "python3.11-venv)." >&2
    return 1
  fi
}

find_python() {
  local python
  if [[ -n "${PYTHON:-}" ]]; then
    if is_python_311 "$PYTHON"; then
      echo "$PYTHON"
      return
    fi
    echo "error: PYTHON is '$PYTHON', wanted a Python 3.11." >&2
    return 1
  fi
  for python in python3.11 python3; do
    if is_python_311 "$python"; then
      echo "$python"
      return
    fi
  done
  echo "error: no Python 3.11 found as python3.11 or python3; install it or" \
    "set PYTHON=/path/to/python3.11." >&2
  return 1
}

is_python_311() {
  command -v "$1" > /dev/null &&
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
      2> /dev/null
}
