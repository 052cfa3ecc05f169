"""GPT-NeoX decode operators and models, each proven against a float64 oracle."""

from cf_ops import _core
from cf_ops._core import CfError

__version__ = _core.version()
CfError.__module__ = __name__

__all__ = ["CfError", "__version__"]
