"""The ``tileweave`` command line. Each command is a file with ``add_parser`` and ``run``."""
