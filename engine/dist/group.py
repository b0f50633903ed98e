"""One rank's view of all of them: tensors through `ranks`, host messages through `control`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from engine.dist.collectives import Collectives, Solo
from engine.dist.control import Control, NoControl, RankError
from engine.dist.watch import Watch
from engine.errors import ConfigError, DSparkError

_LET_GO_S = 3.0


class Group:
    """The ranks that compute one model together; of one rank, it does nothing at no cost."""

    def __init__(
        self,
        ranks: Collectives | None = None,
        control: Control | None = None,
        watch: Watch | None = None,
        ranks_here: int = 1,
    ) -> None:
        """Put the parts together; without any it is a group of one.

        Args:
            ranks: Exchanges of tensors.
            control: Host messages.
            watch: What becomes of the other ranks.
            ranks_here: Ranks on this host.
        """
        self.ranks_here = ranks_here
        self.ranks: Collectives = ranks or Solo()
        self.control: Control = control or NoControl()
        self._watch = watch
        self.stop: Callable[[bool], None] | None = None
        """Ends the processes this one has started; True: at once."""

        self._lock = threading.Lock()
        self._halfway = False
        self._open = True

    @property
    def rank(self) -> int:
        """This rank; 0 does all input and output."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.ranks.size

    @property
    def leads(self) -> bool:
        """Does this rank have others to tell what to do?"""
        return self.size > 1 and self.rank == 0

    def waiting(self) -> Any:
        """A context around waits for a device that other ranks must feed."""
        return nullcontext() if self._watch is None else self._watch.waiting()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A context for what every rank does before the first step: they all succeed, or all fail.

        Inside, ranks meet in `share`, `least` and `compare` alone: there a failure is heard of.

        Raises:
            DSparkError: This rank's error, or another one's.
        """
        self._halfway = True
        try:
            yield
            self.control.exchange("started")
        except RankError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and self._watch is not None:
                news = self._watch.hear()
                if news is not None:
                    raise news from error
            self.control.fail(error)
            raise
        self._halfway = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for a step: a broken exchange is explained by whoever broke it.

        Raises:
            RankError: A rank has failed.
        """
        if self._watch is None:
            yield
            return
        self._watch.check()
        self._halfway = True
        try:
            yield
        except DSparkError:
            raise
        except RuntimeError as error:  # what gloo and NCCL raise
            raise self._watch.explain(error) from error
        self._watch.check()
        self._halfway = False

    def tell(self, message: Any) -> Any:
        """Rank 0's message, on every rank."""
        if not self._open:
            raise DSparkError("the other ranks have been sent away", "make a new engine")
        return self.control.tell(message)

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank; what others give is ignored."""
        return self.control.exchange(value)[0]

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return int(min(self.control.exchange(number)))

    def compare(self, facts: dict[str, str]) -> None:
        """Refuse ranks that would compute different things.

        Args:
            facts: What has to be equal, by name: hashes, or short values.

        Raises:
            ConfigError: They are not; says which rank, and in what.
        """
        everyone = self.control.exchange(facts)
        wrong = [
            f"{name}: {theirs.get(name)} on rank {rank}, {mine} on rank 0"
            for rank, theirs in enumerate(everyone)
            for name, mine in everyone[0].items()
            if theirs.get(name) != mine
        ]
        if wrong:
            raise ConfigError(
                "the ranks do not agree: " + "; ".join(wrong),
                "give every rank the same files and versions",
            )

    def close(self) -> None:
        """Send the other ranks away, at once if a step was left halfway; more calls do nothing."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        broken = self._halfway
        if self._watch is not None:
            self._watch.close()
        if self.leads and not broken:
            try:
                self.control.tell([["close"]])
                self.control.settle()
            except RuntimeError:  # they are gone already
                broken = True
        if self.stop is not None:
            self.stop(broken)
        if self.size > 1:
            # NCCL waits for graphs that still name it: whoever has some drops them first
            letting_go = threading.Thread(target=self.ranks.abort, daemon=True)
            letting_go.start()
            letting_go.join(_LET_GO_S)
