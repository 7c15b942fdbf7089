"""Groups of ranks for tests."""

import torch

from tileweave.runtime.host import session
from tileweave.runtime.host.group import Group


def one_rank() -> Group:
    """Return the group of a single rank without a GPU."""
    return Group(0, 1, 0, torch.device("cpu"), None, None)


def on_nodes(*nodes: str) -> Group:
    """Return a group with one rank on each node."""
    group = Group(0, len(nodes), 0, torch.device("cpu"), None, None)
    vars(group)["nodes"] = nodes
    return group


def open_sessions(monkeypatch, *sessions) -> None:
    """Make ``sessions`` the open sessions: the default group's is named "", like one without a
    name."""
    by_name = {getattr(s, "name", ""): s for s in sessions}
    monkeypatch.setattr(session, "_sessions", by_name)
    monkeypatch.setattr(session, "only", sessions[0] if len(sessions) == 1 else None)
