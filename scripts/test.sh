#!/usr/bin/env bash
# Runs ruff and the test suite, after setting up .venv where that is needed. Arguments go to pytest, for example
#   scripts/test.sh tests/kernels -k strides        scripts/test.sh -m slow        scripts/test.sh -n 0 -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

# Tiny models: two processes of one thread each are faster than one process of two.
export OMP_NUM_THREADS=1
"$python" -m ruff check .
exec "$python" -m pytest -n 2 --dist worksteal "$@"
