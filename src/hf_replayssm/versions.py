"""Versions: ours, and the range of transformers releases that the patched mixers were tested with."""

from __future__ import annotations

import warnings

from packaging.specifiers import SpecifierSet
from packaging.version import Version


__version__ = "0.1.0"

TESTED_TRANSFORMERS = ">=5.24,<5.26"


def in_tested_range(version: str | None = None) -> bool:
    """Whether `version` (default: the installed transformers) is in the tested range, pre-releases included."""
    if version is None:
        import transformers

        version = transformers.__version__
    # `prereleases=True`: a development build of 5.25 is inside the range that its release is inside of.
    return SpecifierSet(TESTED_TRANSFORMERS).contains(Version(version), prereleases=True)


_warned = False


def warn_outside_tested_range() -> None:
    """Warns once a process when the installed transformers is outside the tested range, naming the range."""
    global _warned
    if _warned or in_tested_range():
        return
    _warned = True
    import transformers

    warnings.warn(
        f"hf_replayssm was tested with transformers {TESTED_TRANSFORMERS}; {transformers.__version__} is installed. "
        "Run `hf-replayssm doctor --check` to see whether replay gives the right results with this release.",
        stacklevel=3,
    )
