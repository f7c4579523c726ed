#!/usr/bin/env bash
# Makes .venv if need be and runs the tests. Arguments go to pytest:
#   ./test.sh tests/train -k packing
# Without any, files are shared out between two processes: most of the time goes
# into compiling, and that takes one core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
prepare_environment requirements.txt requirements-dev.txt \
  requirements-notebooks.txt
if [[ $# -eq 0 ]]; then
  set -- --numprocesses=2 --dist=loadfile
fi
exec .venv/bin/python -m pytest "$@"
