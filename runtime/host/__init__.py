"""Group, symmetric heap, session, watchdog and driver calls."""
