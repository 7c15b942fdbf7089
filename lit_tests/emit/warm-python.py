# REQUIRES: since-0.1.14
# RUN: %python %s | %filecheck %s
"""Tests of lit run in forks of a process that has imported TileWeave: see tools/warm_python.py."""

import sys

# CHECK-LABEL: TEST: imported before the program runs
# CHECK: True
print("TEST: imported before the program runs")
print("tileweave" in sys.modules)
