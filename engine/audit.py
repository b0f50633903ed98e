"""Do all ranks carry out the same rounds? Compared over the CPU group before anything follows.

Each rank counts rounds for itself and adds up what it was told and what it worked out. A comparison
is one all-gather of a hash; only where hashes differ does a second one bring what is behind them.
All ranks enter both or none does, and all raise the same error.
"""

import hashlib
import time
from typing import NamedTuple

import numpy as np

from engine.dist.control import RankError
from engine.dist.group import Group
from engine.errors import DSparkError
from engine.spec.plan import PATHS, Plan
from engine.telemetry import ScheduleStats

EVERY = 64
"""Rounds between comparisons that nobody asked for: cheap enough to be always there."""


_DIFFER = "the ranks do not carry out the same rounds"
_HINT = (
    "run the same command again, finished rows are kept; if it happens again, please report it "
    "with these values"
)


class DivergenceError(RankError):
    """Ranks were about to carry out different rounds; every rank raises it."""


class Facts(NamedTuple):
    """What has to be equal on all ranks in one round; the order in which differences are told."""

    round: int
    requests: int
    path: int
    budget: int
    """-1: none."""

    slots: int
    tokens: int
    verify_lens: int
    """Sum over the latest round that has come back: of this one the device has yet to make it."""


_NAMES = {
    "round": "the number of the round",
    "requests": "the requests in it",
    "slots": "the tier of requests",
    "tokens": "the tier of tokens",
    "verify_lens": "the sum of verify_lens of the latest round that came back",
}


class Audit:
    """One rank's side of the comparisons; of one rank there are none.

    Args:
        group: All ranks.
        stats: Counts comparisons.
        every: Rounds between two of them.
    """

    def __init__(self, group: Group, stats: ScheduleStats, every: int) -> None:
        self._group, self._stats, self._every = group, stats, every
        self._round = self._verify_lens = 0
        self._since: list[Facts] = []

    def came_back(self, verify_lens: int) -> None:
        """A round's result is there.

        Args:
            verify_lens: Their sum over the batch.
        """
        self._verify_lens = verify_lens

    def check(self, plan: Plan, num_reqs: int, *, revised: bool = False) -> None:
        """Note a round, and compare if it is time to; before anything is derived from `plan`.

        Args:
            plan: As this rank received it.
            num_reqs: R, as this rank has it.
            revised: It takes the place of an earlier plan of the same round.

        Raises:
            DivergenceError: Ranks differ; on every rank.
        """
        if self._group.size == 1:
            return
        self._round += not revised
        path, budget, slots, tokens = plan.to_wire()
        self._since.append(
            Facts(self._round, num_reqs, path, budget, slots, tokens, self._verify_lens)
        )
        if self._round % self._every:
            return
        begin = time.perf_counter()
        # a rank that never comes is news after a while, as it is where a device waits for it
        with self._group.waiting():
            self._compare()
        self._stats.audits += 1
        self._stats.audit_seconds += time.perf_counter() - begin

    def _compare(self) -> None:
        mine, self._since = self._since, []
        digest = hashlib.blake2b(np.array(mine, dtype=np.int64).tobytes(), digest_size=8).digest()
        told = self._group.control.gather(int.from_bytes(digest, "little", signed=True))
        if len(set(told)) > 1:  # on every rank: all of them go on to the second exchange
            everyone = self._group.control.exchange(mine)
            raise _divergence([[Facts(*facts) for facts in rank] for rank in everyone])


def _divergence(everyone: list[list[Facts]]) -> DivergenceError:
    """What differs first, and how.

    Args:
        everyone: By rank, what each noted since the last comparison; somewhere they differ.
    """
    for facts in zip(*everyone, strict=False):
        for name, values in zip(Facts._fields, zip(*facts, strict=True), strict=True):
            if len(set(values)) > 1:
                shown = ", ".join(f"{_shown(name, v)} on rank {r}" for r, v in enumerate(values))
                where = f"in round {facts[0].round} " if name != "round" else ""
                return DivergenceError(
                    f"{_DIFFER}: {where}{_NAMES.get(name, f'the {name}')} is {shown}", _HINT
                )
    counts = ", ".join(f"{len(noted)} on rank {rank}" for rank, noted in enumerate(everyone))
    return DivergenceError(f"{_DIFFER}: rounds since the last comparison are {counts}", _HINT)


def _shown(name: str, value: int) -> str:
    if name == "path":
        return PATHS[value]
    return "none" if name == "budget" and value < 0 else str(value)


def out_of_step(what: str) -> DSparkError:
    """A rank that finds out alone, where others wait for it: its end is the news for them.

    Args:
        what: What it has that rank 0 has not.
    """
    return DSparkError(f"{_DIFFER}: {what}", _HINT)
