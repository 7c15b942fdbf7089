"""``tileweave bench``: ``command`` measures; the other modules define the cases, the
implementations and the output."""
