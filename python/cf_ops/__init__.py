"""GPT-NeoX decode operators and models, each proven against a float64 oracle."""

from cf_ops import ops
from cf_ops._core import CfError, __version__

__all__ = ["CfError", "__version__", "ops"]
