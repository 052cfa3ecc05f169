"""``python -m cf_ops``: what this installation is and whether its ops are right; ``generate``, ``eval``,
``memorize``, ``sweep``, ``activations``, ``bench``, ``serve``."""

import sys

from cf_ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
