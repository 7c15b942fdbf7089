"""Small programs that ``emit`` accepted at f1ce1b62, and that were wrong at the device level.

Each is the smallest form of a generated program. ``RANKS`` is its number of ranks, ``ARCH`` the
architecture of the fault, ``FIXES`` the passes without which it is wrong again.
"""
