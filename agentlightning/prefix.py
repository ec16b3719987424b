"""Finds the longest known token sequence that is an exact prefix of another.

A sequence is known by its length and a 128-bit digest of its ids, so an index costs some
tens of bytes a sequence however long it is, and a look-up hashes its argument once.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Generic, TypeVar

from agentlightning.types import Tokens

K = TypeVar("K")

_DIGEST_BYTES = 16


def prefix_digests(ids: Tokens, lengths: Iterable[int]) -> dict[int, bytes]:
    """Digest of ``ids[:n]`` for each ``n`` in ``lengths`` (ascending, at most ``len(ids)``)."""
    data = memoryview(ids).cast("B")
    width = ids.itemsize
    hasher = blake2b(digest_size=_DIGEST_BYTES)
    digests: dict[int, bytes] = {}
    done = 0
    for length in lengths:
        hasher.update(data[done * width : length * width])
        digests[length] = hasher.copy().digest()
        done = length
    return digests


def sequence_digest(ids: Tokens) -> bytes:
    """Digest of all of ``ids``."""
    return blake2b(memoryview(ids).cast("B"), digest_size=_DIGEST_BYTES).digest()


class PrefixIndex(Generic[K]):
    """Token sequences by content.

    Example:
        >>> from agentlightning.types import token_array
        >>> index = PrefixIndex[str]()
        >>> index.add(token_array([1, 2, 3]), "first")
        >>> index.longest(token_array([1, 2, 3, 4]))
        ('first', 3)
        >>> index.longest(token_array([1, 2])) is None
        True
    """

    def __init__(self) -> None:
        self._keys: dict[int, dict[bytes, K]] = {}

    def add(self, ids: Tokens, key: K) -> None:
        """Adds a sequence; of two equal sequences the first one's key stays."""
        self.add_digest(len(ids), sequence_digest(ids), key)

    def add_digest(self, length: int, digest: bytes, key: K) -> None:
        """Adds a sequence known only by its length and digest."""
        self._keys.setdefault(length, {}).setdefault(digest, key)

    def longest(self, ids: Tokens) -> tuple[K, int] | None:
        """Key and length of the longest added sequence that starts ``ids``, or None."""
        lengths = sorted(length for length in self._keys if length <= len(ids))
        digests = prefix_digests(ids, lengths)
        for length in reversed(lengths):
            known = self._keys[length]
            if digests[length] in known:
                return known[digests[length]], length
        return None
