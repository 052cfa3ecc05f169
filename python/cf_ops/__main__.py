"""``python -m cf_ops``: what this installation is and whether its ops are right; ``generate``, ``bench``, ``eval``."""

import sys


def main() -> int:
    return 0


if __name__ == "__main__":
    sys.exit(main())
