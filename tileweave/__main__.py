"""``python -m tileweave``: the command line of a checkout that is not installed."""

import sys

from .cli import main

sys.exit(main())
