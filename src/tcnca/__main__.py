"""`python -m tcnca`, and the command `tcnca`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Ctrl-C while modules are imported ends it without a traceback."""
    try:
        from tcnca.cli import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
