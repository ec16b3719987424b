from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.prefix import PrefixIndex, prefix_digests, sequence_digest
from agentlightning.types import token_array

# Few different tokens, so that sequences often share prefixes.
sequences = st.lists(st.integers(0, 2), max_size=8)


@given(known=st.lists(sequences, max_size=10), ids=sequences)
def test_longest_is_what_a_plain_search_finds(known: list[list[int]], ids: list[int]) -> None:
    index = PrefixIndex[int]()
    for position, each in enumerate(known):
        index.add(token_array(each), position)
    fitting = [each for each in known if ids[: len(each)] == each]
    found = index.longest(token_array(ids))
    if not fitting:
        assert found is None
    else:
        best = max(fitting, key=len)
        assert found == (known.index(best), len(best))


@given(sequences)
def test_digests_of_prefixes_are_those_of_the_prefixes(ids: list[int]) -> None:
    lengths = range(len(ids) + 1)
    digests = prefix_digests(token_array(ids), lengths)
    assert digests == {n: sequence_digest(token_array(ids[:n])) for n in lengths}


def test_a_prefix_across_a_tokens_bytes_does_not_fit() -> None:
    index = PrefixIndex[str]()
    index.add(token_array([1]), "one")
    assert index.longest(token_array([257])) is None
