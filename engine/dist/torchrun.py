"""Ranks that torchrun has started, on one host or several.

Rank 0 runs the command; the others wait for its engines. Each engine is a room of the store that
all ranks meet at: rank 0 opens rooms one after another, and says when there will be no more.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from engine.errors import ConfigError

c10d: Any = torch.distributed  # its stubs lack half of what it exports
MEET_S = 300.0
"""Longest time for all ranks to come up."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those that torchrun has started."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    serves: bool
    """Does this process run the store that ranks meet at?"""


def launched(environment: Mapping[str, str] | None = None) -> Place | None:
    """What torchrun says; None where it is not what started this process.

    Args:
        environment: None: the process's own.
    """
    found = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in found:
        return None
    rank = int(found["RANK"])
    return Place(
        rank=rank,
        size=int(found["WORLD_SIZE"]),
        local_rank=int(found["LOCAL_RANK"]),
        host=found["MASTER_ADDR"],
        port=int(found["MASTER_PORT"]),
        serves=rank == 0 and found.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def resolve_size(asked: int | None, place: Place | None) -> int:
    """Ranks of an engine.

    Args:
        asked: -tp; None leaves it to the launcher.
        place: This process under torchrun.

    Raises:
        ConfigError: torchrun has started another number.
    """
    if place is None:
        return asked or 1
    if asked is not None and asked != place.size:
        raise ConfigError(
            f"-tp {asked}, but torchrun has started {place.size} processes",
            "make them equal, or leave -tp out",
        )
    return place.size


def meet(place: Place) -> Any:
    """The store of all ranks."""
    wait = timedelta(seconds=MEET_S)
    store = c10d.TCPStore(place.host, place.port, None, place.serves, wait, False)
    return c10d.PrefixStore("dspark", store)


def open_room(store: Any, kind: dict[str, str]) -> Any:
    """Rank 0's next engine: a store of its own.

    Args:
        store: From `meet`.
        kind: What the other ranks need to know of it.
    """
    number = store.add("rooms", 1)
    store.set(f"room/{number}", json.dumps(kind))
    return c10d.PrefixStore(f"inside/{number}", store)


def dismiss(store: Any) -> None:
    """There will be no more rooms."""
    open_room(store, {})


def next_room(store: Any, number: int) -> tuple[Any, dict[str, str]] | None:
    """Wait for room `number`, counted from 1; None when rank 0 is done.

    Args:
        store: From `meet`.
        number: Which.
    """
    key = f"room/{number}"
    while True:
        try:
            store.wait([key], timedelta(seconds=60))
            break
        except c10d.DistStoreError:
            continue  # rank 0 takes its time
        except RuntimeError:
            return None  # the store has gone with rank 0
    kind: dict[str, str] = json.loads(store.get(key))
    return (c10d.PrefixStore(f"inside/{number}", store), kind) if kind else None
