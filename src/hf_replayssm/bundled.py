"""The models and the text that ship with the package: tiny, trained, for the demo, the tests and a first try offline.

A *target* (a hybrid of Mamba-2 and attention layers), a much smaller *draft* with the same tokenizer, for assisted
generation, and text that neither was trained on. Sources and licences are in NOTICE.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ASSETS = Path(__file__).parent / "assets"


def target_path() -> Path:
    """Folder of the target model and the tokenizer, as `from_pretrained` takes it."""
    return _existing("target")


def draft_path() -> Path:
    """Folder of the draft model and the tokenizer (the target's)."""
    return _existing("draft")


def heldout_path(kind: str = "txt") -> Path:
    """File of the held-out text: "txt", one text; "jsonl", one document per line, in the column "text"."""
    if kind not in ("txt", "jsonl"):
        raise ValueError(f'The held-out text is there as "txt" and as "jsonl", not as {kind!r}.')
    return _existing(f"heldout.{kind}")


def load_target(**kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target model, in eval mode, and its tokenizer.

    `kwargs` go to `AutoModelForCausalLM.from_pretrained`; dtype is float32 unless given. The model is upstream's, not
    enabled for replay.
    """
    return _load(target_path(), kwargs)


def load_draft(**kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The draft model, in eval mode, and its tokenizer, as `load_target`."""
    return _load(draft_path(), kwargs)


def _load(path: Path, kwargs: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, **{"dtype": "float32", **kwargs})
    return model.eval(), AutoTokenizer.from_pretrained(path)


def _existing(name: str) -> Path:
    path = ASSETS / name
    if not path.exists():
        raise FileNotFoundError(
            f"The bundled {name} is missing from this installation ({path}). Install the package from its wheel, or "
            "run scripts/train_bundled.py in a checkout, which makes it."
        )
    return path
