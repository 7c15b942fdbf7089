"""Groups of ranks for tests."""

import torch

from tileweave.runtime.host.group import Group


def one_rank() -> Group:
    """Return the group of a single rank without a GPU."""
    return Group(0, 1, 0, torch.device("cpu"), None, None)
