"""
Lays the kernels out as the Kernel Hub's tool loads them, under kernels/build/ (ignored by git):

    python scripts/build_kernel_hub.py
    >>> kernels.get_local_kernel(Path("kernels"))

The kernels are pure Triton, so nothing is compiled: one "universal" variant serves every device.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import tomllib


KERNELS = Path(__file__).parents[1] / "kernels"


def build(folder: Path, backend: str = "cuda") -> Path:
    """Writes `folder`/build/torch-universal and returns it. `backend`: what the variant says it is for."""
    general = tomllib.loads((KERNELS / "build.toml").read_text(encoding="utf-8"))["general"]
    variant = folder / "build" / "torch-universal"
    shutil.rmtree(variant, ignore_errors=True)
    package = KERNELS / "torch-ext" / general["name"].replace("-", "_")
    shutil.copytree(package, variant, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = {
        "id": f"_{package.name}_{general['version']}",
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1), encoding="utf-8")
    return variant


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    print(build(KERNELS, parser.parse_args().backend))
