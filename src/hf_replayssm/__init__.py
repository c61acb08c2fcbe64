"""
hf_replayssm: replayed recurrent states for hybrid language models in Hugging Face transformers.

    model = hf_replayssm.enable(AutoModelForCausalLM.from_pretrained("ibm-ai-platform/Bamba-9B-v2"))
    model.generate(**inputs)                                # replay is now the default cache
    model.generate(**inputs, assistant_model=draft)         # and drafts can be taken back
"""

from .cache import ReplayCache, ReplayStats
from .config import ReplayConfig
from .integration import disable, enable, is_enabled, release
from .layers import CropError
from .speculative import SpeculationStatistics, SpeculativeOutput, speculative_generate
from .static import CacheFullError, StaticReplayCache
from .versions import __version__


__all__ = [
    "CacheFullError",
    "CropError",
    "ReplayCache",
    "ReplayConfig",
    "ReplayStats",
    "SpeculationStatistics",
    "SpeculativeOutput",
    "StaticReplayCache",
    "__version__",
    "disable",
    "enable",
    "is_enabled",
    "release",
    "speculative_generate",
]
