"""What torchrun tells its processes, and how many ranks that makes."""

import pytest

from engine.dist.torchrun import Place, launched, resolve_size
from engine.errors import ConfigError

TOLD = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}


def test_a_place_is_read_from_the_environment() -> None:
    place = launched(TOLD)
    assert place == Place(3, 4, 1, "10.0.0.7", 29500, serves=False)
    first = launched({**TOLD, "RANK": "0"})
    assert first is not None
    assert first.serves
    agent = launched({**TOLD, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None
    assert not agent.serves, "torchrun's agent runs the store"


def test_ranks_of_other_launchers_are_not_ours() -> None:
    """A batch system that sets RANK for its own purposes made a follower out of a lone command."""
    assert launched({"RANK": "1", "WORLD_SIZE": "2"}) is None


def test_size_is_what_was_asked_or_what_torchrun_started() -> None:
    place = launched(TOLD)
    assert resolve_size(None, None) == 1
    assert resolve_size(3, None) == 3
    assert resolve_size(None, place) == resolve_size(4, place) == 4
    with pytest.raises(ConfigError, match="-tp 2, but torchrun has started 4 processes"):
        resolve_size(2, place)
