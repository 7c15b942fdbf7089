"""The command line: ``tileweave``."""
