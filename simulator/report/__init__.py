"""Reports of faults, timelines and progress."""
