"""``python -m tileweave`` runs the command line without an installation."""

import sys

from .cli.main import main

sys.exit(main())
