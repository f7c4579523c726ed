#!/usr/bin/env bash
# Makes .venv if need be and runs the quickstart. Arguments are overrides:
#   ./quickstart.sh --config.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
prepare_environment requirements.txt
exec .venv/bin/python -m areal_jax.run \
  --config=experiments/quickstart.py "$@"
