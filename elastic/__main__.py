"""`python -m elastic` is `elasticd`."""

from __future__ import annotations

import sys

from elastic.cli import main

if __name__ == "__main__":
    sys.exit(main())
