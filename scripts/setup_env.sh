# Sourced by demo.sh and test.sh: makes .venv with the versions of constraints.txt, or finds it up to date.
# Needs Python and nothing else; PYTHON=/path/to/python chooses which one.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="$root/.venv/bin/python"

# transformers 5.24 does not install on Python 3.10.
suitable='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
base=""
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c "$suitable" >/dev/null 2>&1; then
        base="$candidate"
        break
    fi
done
if [ -z "$base" ]; then
    echo "Python 3.11, 3.12 or 3.13 is needed. Install one, or name it: PYTHON=/path/to/python bash $0" >&2
    exit 1
fi

# What the environment is made from. As long as it stays the same, pip is not called again.
stamp="$("$base" - "$root" <<'END'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
parts = [str(root).encode(), sys.version.encode()]
parts += [(root / name).read_bytes() for name in ("pyproject.toml", "scripts/constraints.txt", "scripts/setup_env.sh")]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
END
)"

if [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]; then
    echo "Installing into $root/.venv: some minutes the first time"
    if ! "$python" -c "$suitable" >/dev/null 2>&1; then
        "$base" -m venv --clear .venv
    fi
    rm -f .venv/stamp
    # torch first and by itself: one build of it, the pinned one, before any other package can ask for torch.
    "$python" -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt torch
    "$python" -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e '.[test]'
    echo "$stamp" > .venv/stamp
fi
