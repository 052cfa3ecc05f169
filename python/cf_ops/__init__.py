"""GPT-NeoX decode operators and models, each proven against a float64 oracle."""

from cf_ops import _waiting  # first: it loads the compiled part
from cf_ops import _core, hf, ops
from cf_ops._core import CfError
from cf_ops._device import cuda_available
from cf_ops.model import Generated, Generation, GenerationInterrupted, Model, Perplexity, load

__version__ = _core.version()
CfError.__module__ = __name__

__all__ = [
    "CfError",
    "Generated",
    "Generation",
    "GenerationInterrupted",
    "Model",
    "Perplexity",
    "__version__",
    "cuda_available",
    "hf",
    "load",
    "ops",
]
