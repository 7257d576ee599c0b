"""`python -m kdlab.cli`, for where the `kdlab` command is not installed."""

import sys

from kdlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
