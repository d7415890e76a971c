"""Ids that nobody can guess."""

import re

from gradserve_server.resources.registry import RandomIds


def test_ids() -> None:
    new_id = RandomIds()
    ids = [new_id() for _ in range(1000)]
    assert len({*ids, RandomIds()()}) == 1001
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
