"""``tileweave completion``: ``arguments`` reads the parsers; each shell has a file."""
