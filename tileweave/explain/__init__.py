"""``tw.explain``: the synchronization that a program gets."""
