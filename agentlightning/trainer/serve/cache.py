"""Which rows of the key-value pool hold which token sequence.

The pool has one row a token (its keys and values in all layers). A sequence is a list of
rows, so sequences that begin alike share rows without copies. A row is free once nobody
refers to it: a running sequence and the prefix tree each count as one reference.

The prefix tree is a radix tree over token ids as in SGLang (Zheng et al., 2024,
arXiv:2312.07104, section 3): exact to the token, leaves evicted least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]


class RowPool:
    """Free list and reference counts of ``size`` rows."""

    def __init__(self, size: int) -> None:
        self._references = np.zeros(size, np.int32)
        self._free = np.arange(size, dtype=np.int64)[::-1].copy()
        self.free_count = size

    def take(self, count: int) -> Rows:
        """``count`` free rows with one reference each; the caller checked ``free_count``."""
        self.free_count -= count
        rows: Rows = self._free[self.free_count : self.free_count + count][::-1].copy()
        self._references[rows] = 1
        return rows

    def hold(self, rows: Rows) -> None:
        self._references[rows] += 1

    def drop(self, rows: Rows) -> None:
        """Gives up one reference of each row; rows without any become free."""
        self._references[rows] -= 1
        freed = rows[self._references[rows] == 0]
        self._free[self.free_count : self.free_count + len(freed)] = freed
        self.free_count += len(freed)

    def shared(self, rows: Rows) -> bool:
        """Whether somebody besides one holder refers to any of ``rows``."""
        return bool((self._references[rows] > 1).any())


@dataclass(eq=False)
class _Node:
    ids: Ids
    rows: Rows
    parent: _Node | None
    used: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixCache:
    """Rows of computed prefixes of one policy version, over a pool that it shares.

    Example:
        >>> cache = PrefixCache(8)
        >>> rows = cache.allocate(3)
        >>> cache.insert(np.array([5, 6, 7], np.int32), rows)
        >>> cache.release(rows)
        >>> len(cache.match(np.array([5, 6, 9], np.int32)))
        2
    """

    def __init__(self, size: int) -> None:
        self.pool = RowPool(size)
        self.size = size
        self._clock = 0
        self._root = self._new_root()

    def allocate(self, count: int) -> Rows | None:
        """``count`` rows, evicting cached prefixes that no sequence uses; None where too few."""
        if self.pool.free_count < count:
            self._evict(count)
        return self.pool.take(count) if self.pool.free_count >= count else None

    def release(self, rows: Rows) -> None:
        """A sequence no longer needs ``rows``."""
        self.pool.drop(rows)

    def match(self, ids: Ids) -> Rows:
        """Rows of the longest cached prefix of ``ids``, held for the caller."""
        found = [node.rows[:length] for node, length in self._walk(ids)]
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        self.pool.hold(rows)
        return rows

    def insert(self, ids: Ids, rows: Rows) -> None:
        """Makes ``rows``, the computed tokens ``ids``, available to later sequences.

        What the tree holds already stays: of two equal prefixes the first one's rows are kept.
        """
        node, done = self._root, 0
        for node, length in self._walk(ids):
            done += length
            if length < len(node.ids):
                self._split(node, length)
        if done < len(ids):
            child = _Node(ids[done:].copy(), rows[done:].copy(), node, self._clock)
            node.children[int(ids[done])] = child
            self.pool.hold(child.rows)

    def clear(self) -> None:
        """Forgets every prefix. Rows that running sequences use live on until released."""
        for node in list(self._nodes()):
            self.pool.drop(node.rows)
        self._root = self._new_root()

    def cached_tokens(self) -> int:
        return sum(len(node.rows) for node in self._nodes())

    def _new_root(self) -> _Node:
        return _Node(np.empty(0, np.int32), np.empty(0, np.int64), None)

    def _walk(self, ids: Ids) -> Iterator[tuple[_Node, int]]:
        """Nodes along ``ids`` with how many of their tokens agree; touches what it passes."""
        self._clock += 1
        node, done = self._root, 0
        while done < len(ids) and (child := node.children.get(int(ids[done]))):
            length = common_prefix(child.ids, ids[done:])
            child.used = self._clock
            yield child, length
            if length < len(child.ids):
                return
            node, done = child, done + length

    def _split(self, node: _Node, length: int) -> None:
        """``node`` keeps its first ``length`` tokens; the rest becomes its only child."""
        rest = _Node(node.ids[length:], node.rows[length:], node, node.used, node.children)
        for child in rest.children.values():
            child.parent = rest
        node.ids, node.rows = node.ids[:length], node.rows[:length]
        node.children = {int(rest.ids[0]): rest}

    def _evict(self, wanted: int) -> None:
        """Drops leaves, least recently used first, until ``wanted`` rows are free."""
        while self.pool.free_count < wanted:
            leaves = sorted(
                (n for n in self._nodes() if not n.children and not self.pool.shared(n.rows)),
                key=lambda n: n.used,
            )
            if not leaves:
                return
            for leaf in leaves:
                if self.pool.free_count >= wanted:
                    return
                self.pool.drop(leaf.rows)
                assert leaf.parent is not None  # the root is not among the nodes
                del leaf.parent.children[int(leaf.ids[0])]

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids agree.

    Example:
        >>> common_prefix(np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32))
        2
    """
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
