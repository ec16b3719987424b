from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentlightning.trainer.serve.cache import PrefixCache


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def store(cache: PrefixCache, values: np.ndarray) -> np.ndarray:
    """As the engine does: match, compute the rest, remember, release. Returns the rows."""
    shared = cache.match(values)
    new = cache.allocate(len(values) - len(shared))
    assert new is not None
    rows = np.concatenate((shared, new))
    cache.insert(values, rows)
    cache.release(rows)
    return rows


def test_branches_share_the_rows_of_their_common_prefix() -> None:
    cache = PrefixCache(16)
    first = store(cache, ids(1, 2, 3, 4))
    second = store(cache, ids(1, 2, 9))
    assert second[:2].tolist() == first[:2].tolist()
    assert cache.cached_tokens() == 5
    assert cache.match(ids(1, 2, 3, 4, 5)).tolist() == first.tolist()
    assert cache.match(ids(1, 2, 9)).tolist() == second.tolist()
    assert cache.match(ids(2, 2)).tolist() == []


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = PrefixCache(6)
    store(cache, ids(1, 1))
    store(cache, ids(2, 2))
    store(cache, ids(3, 3))
    cache.release(cache.match(ids(1, 1)))
    store(cache, ids(4, 4))
    assert [len(cache.match(ids(i, i))) for i in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_rows_in_use_are_not_evicted() -> None:
    cache = PrefixCache(4)
    store(cache, ids(1, 2, 3))
    held = cache.match(ids(1, 2, 3))
    assert cache.allocate(2) is None
    cache.release(held)
    assert cache.allocate(2) is not None


def test_clear_keeps_what_sequences_hold_until_they_release_it() -> None:
    cache = PrefixCache(4)
    store(cache, ids(1, 2, 3))
    held = cache.match(ids(1, 2))
    cache.clear()
    assert cache.pool.free_count == 2
    assert len(cache.match(ids(1, 2))) == 0
    cache.release(held)
    assert cache.pool.free_count == 4


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_lost_or_given_twice(seed: int) -> None:
    rng, cache = random.Random(seed), PrefixCache(40)
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(300):
        values = ids(*(rng.randrange(2) for _ in range(rng.randrange(1, 12))))
        shared = cache.match(values)
        for at, row in enumerate(shared):
            assert content[int(row)] == tuple(values[: at + 1])
        new = cache.allocate(len(values) - len(shared))
        assert new is not None
        rows = np.concatenate((shared, new))
        for at, row in enumerate(rows):
            content[int(row)] = tuple(values[: at + 1])
        cache.insert(values, rows)
        cache.release(rows)
        assert cache.cached_tokens() + cache.pool.free_count == 40


class Interleavings(RuleBasedStateMachine):
    """Sequences come, grow, are remembered and leave in any order, between clears: a row is
    free, cached, or held by exactly those who may, and none is lost."""

    SIZE = 24

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(self.SIZE)
        self.held: list[tuple[np.ndarray, np.ndarray]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(values=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, values: list[int]) -> None:
        tokens = ids(*values)
        shared = self.cache.match(tokens)
        for at, row in enumerate(shared):
            assert self.content[int(row)] == tuple(values[: at + 1])
        new = self.cache.allocate(len(values) - len(shared))
        if new is None:
            self.cache.release(shared)
            return
        others = {int(row) for _, rows in self.held for row in rows}
        assert others.isdisjoint(new.tolist())
        rows = np.concatenate((shared, new))
        self.content |= {int(row): tuple(values[: at + 1]) for at, row in enumerate(rows)}
        self.held.append((tokens, rows))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        tokens, rows = data.draw(st.sampled_from(self.held))
        count = data.draw(st.integers(1, len(rows)))
        self.cache.insert(tokens[:count], rows[:count])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        _, rows = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.release(rows)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def every_row_is_free_or_somebodys(self) -> None:
        held = {int(row) for _, rows in self.held for row in rows}
        assert self.cache.pool.free_count + len(held | cached_rows(self.cache)) == self.SIZE

    def teardown(self) -> None:
        for _, rows in self.held:
            self.cache.release(rows)
        self.cache.clear()
        taken = self.cache.allocate(self.SIZE)
        assert taken is not None
        assert sorted(taken.tolist()) == list(range(self.SIZE))


def cached_rows(cache: PrefixCache) -> set[int]:
    return {int(row) for node in cache._nodes() for row in node.rows}


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
