"""Host messages, agreements, and what is said when they fail."""

import pytest

from engine.dist.control import RankError
from engine.dist.group import Group
from engine.errors import CapacityError, ConfigError
from tests.helpers.distributed import Ranks, run_ranks


def messages(ranks: Ranks) -> None:
    group = ranks.group()
    for length in (0, 1, 4000, 4084, 4085, 4086, 4087, 100_000):
        text = "é\ud800" + "x" * length
        assert group.tell({"text": text} if ranks.rank == 0 else None) == {"text": text}
    assert group.control.exchange("ab" * ranks.rank) == ["ab" * r for r in range(ranks.size)]
    assert group.share("mine" if ranks.rank == 0 else None) == "mine"
    assert group.least(10 - ranks.rank) == 11 - ranks.size


def test_messages_of_every_length_arrive() -> None:
    run_ranks(messages, 3)


def one_fails(ranks: Ranks) -> None:
    """Rank 1 cannot start: all hear why, none waits for it."""
    group = ranks.group()
    with pytest.raises((CapacityError, RankError)) as info, group.starting():
        if ranks.rank == 1:
            raise CapacityError("too little memory here", "use another card")
        group.least(3)
    assert str(info.value) == ("" if ranks.rank == 1 else "rank 1: ") + "too little memory here"
    assert info.value.hint == "use another card"
    assert (ranks.rank == 1) == (type(info.value) is CapacityError)


def test_a_rank_that_cannot_start_is_every_ranks_error() -> None:
    run_ranks(one_fails, 3)


def disagree(ranks: Ranks) -> None:
    group = ranks.group()
    group.compare({"settings": "a", "target checkpoint": "b"})
    facts = {"settings": "a", "target checkpoint": "c" if ranks.rank == 1 else "b"}
    with pytest.raises(ConfigError, match="target checkpoint: c on rank 1, b on rank 0") as info:
        group.compare(facts)
    assert "settings" not in str(info.value)


def test_ranks_that_hold_different_things_are_named_with_both_values() -> None:
    run_ranks(disagree, 3)


def test_a_group_of_one_does_nothing() -> None:
    group = Group()
    with group.starting(), group.step(), group.waiting():
        assert group.tell([1]) == [1]
        assert group.least(4) == 4
        group.compare({"a": "b"})
    assert (group.rank, group.size, group.leads) == (0, 1, False)
    group.close()
