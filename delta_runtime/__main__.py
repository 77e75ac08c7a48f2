"""``python -m delta_runtime``; see `delta_runtime/cli`."""

import sys

from delta_runtime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
