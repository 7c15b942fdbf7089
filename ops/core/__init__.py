"""Parts that all operators share: checks of problems, calls, caches, torch registration."""
