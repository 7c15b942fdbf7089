"""``python -m tileweave``: the command line of a checkout that is not installed."""

import sys

from .cli.main import main

sys.exit(main())
