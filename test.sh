#!/usr/bin/env bash
# Makes .venv if need be and runs the tests. Arguments go to pytest:
#   ./test.sh tests/train -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
prepare_environment requirements.txt requirements-dev.txt \
  requirements-notebooks.txt
exec .venv/bin/python -m pytest "$@"
