"""GPT-NeoX decode operators and models, each proven against a float64 oracle."""

from cf_ops._core import CfError, __version__
from cf_ops.model import Generated, Generation, GenerationInterrupted, Model, Perplexity, load

__all__ = [
    "CfError",
    "Generated",
    "Generation",
    "GenerationInterrupted",
    "Model",
    "Perplexity",
    "__version__",
    "load",
]
