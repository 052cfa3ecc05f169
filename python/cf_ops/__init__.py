"""Decodes language models at the speed of memory; each operator is proven against a float64 oracle."""

try:
    from cf_ops import _waiting  # first: it loads OpenMP
    from cf_ops import _core
except ImportError as error:
    if "libgomp" not in str(error):
        raise
    needs = "cf_ops needs GCC's OpenMP library libgomp.so.1: apt-get install libgomp1, or import torch first"
    raise ImportError(needs) from None

from cf_ops import hf, ops
from cf_ops._activations import Activations, activations
from cf_ops._core import CfError
from cf_ops._device import cuda_available
from cf_ops._memorize import Memorized, memorize
from cf_ops._sweep import Sweep, pythia_steps, surprisal, sweep
from cf_ops.model import (
    AsyncGeneration,
    Generated,
    Generation,
    GenerationInterrupted,
    Model,
    Perplexity,
    Scored,
    Stream,
    load,
)

__version__ = _core.version()
CfError.__module__ = __name__

__all__ = [
    "Activations",
    "AsyncGeneration",
    "CfError",
    "Generated",
    "Generation",
    "GenerationInterrupted",
    "Memorized",
    "Model",
    "Perplexity",
    "Scored",
    "Stream",
    "Sweep",
    "__version__",
    "activations",
    "cuda_available",
    "hf",
    "load",
    "memorize",
    "ops",
    "pythia_steps",
    "surprisal",
    "sweep",
]
