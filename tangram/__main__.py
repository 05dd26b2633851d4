"""`python -m tangram`."""

import sys

from tangram.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
