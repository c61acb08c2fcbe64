#!/usr/bin/env bash
# The demo: text from a hybrid model through transformers' cache and through replay, the perplexity through both, and
# what was saved. Sets up .venv where that is needed. Arguments go to demo.py:
#   scripts/demo.sh        scripts/demo.sh --model ID_OR_PATH --prompt "Once upon a time"        scripts/demo.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
exec "$python" scripts/demo.py "$@"
