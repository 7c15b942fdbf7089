"""tileweave.integrations.torchtitan with torchtitan; ``make test-engines`` runs it."""

from __future__ import annotations

from tests.engines import torchtitan_on_ranks as on_ranks
from tests.ops.on_ranks import Ranks


def test_layer():
    ranks = Ranks(2)
    try:
        for error in ranks.run(on_ranks.layer):
            if isinstance(error, Exception):
                raise error
            assert error < 2e-2  # torchtitan multiplies in bf16
    finally:
        ranks.close()
