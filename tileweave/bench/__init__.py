"""``tileweave bench``: ``command`` measures, the other modules are what it measures and says."""
