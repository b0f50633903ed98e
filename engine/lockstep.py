"""What rank 0 does, done by every rank: host commands in order, each before the step it belongs to.

All ranks run the same scheduler on the same requests, so that little has to be said. What changes
an engine between steps is noted, and told together with the next thing that needs all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.dist.group import Group


class Lockstep:
    """Commands of one engine; of one rank, nobody is told.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._noted: list[list[Any]] = []

    def note(self, name: str, *given: Any) -> None:
        """Have the other ranks do the same before the next `together`.

        Args:
            name: What.
            given: JSON values.
        """
        if self._group.leads:
            self._noted.append([name, *given])

    @contextmanager
    def together(self, name: str, *given: Any) -> Iterator[None]:
        """A context for what all ranks do at the same time.

        Args:
            name: What.
            given: JSON values.

        Raises:
            RankError: A rank has failed.
        """
        with self._group.step():
            if self._group.leads:
                noted, self._noted = self._noted, []
                self._group.tell([*noted, [name, *given]])
            yield

    def commands(self) -> Iterator[list[Any]]:
        """On another rank: what rank 0 does, until it sends this one away."""
        while True:
            for command in self._group.tell(None):
                if command == ["close"]:
                    return
                yield command
