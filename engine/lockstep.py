"""What rank 0 does, done by every rank: host commands in order, each before the step it belongs to.

All ranks run the same scheduler on the same requests, so that little has to be said. What changes
an engine between steps is noted, and told together with the next thing that needs all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from engine.audit import out_of_step
from engine.dist.group import Group
from engine.runner.model_runner import ModelRunner
from engine.sizing import Limits
from engine.spec.tiers import Tiers


def compare_limits(group: Group, limits: Limits, gamma: int) -> None:
    """Refuse ranks whose steps would have other shapes.

    Args:
        group: The ranks.
        limits: This rank's.
        gamma: Draft tokens a round.

    Raises:
        ConfigError: They differ.
    """
    tiers = Tiers(limits.max_num_seqs, gamma)
    group.compare(
        {
            # what a rank has found free, and what it keeps for graphs, are its own
            "limits": str(replace(limits, graph_pool_bytes=0, kv_account="")),
            "graph tiers": f"{tiers.requests}, {tiers.widths}",
        }
    )


def part(group: Group, runner: ModelRunner) -> None:
    """Send the other ranks away, and let go of what connects this one to them."""
    if group.size > 1 and runner.graphs is not None:
        runner.graphs.clear()
    group.close()


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
        """On another rank: what rank 0 does, until it sends this one away.

        Raises:
            DSparkError: Rank 0 tells something else: it does not do what this rank does.
        """
        while True:
            for command in self._group.tell(None):
                if command == ["close"]:
                    return
                if isinstance(command, int):  # a plan's
                    raise out_of_step("rank 0 has a round to decode where this rank has none")
                yield command
