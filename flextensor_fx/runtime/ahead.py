"""Copies that the end of one call starts for the next: held until its prefetches take them over, dropped when room is needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_MOST_SKIPPED = 63
_POLL_S = 0.0002


class Keyed(Protocol):
    """A transfer, as far as it matters here."""

    @property
    def key(self) -> str:
        """Of its weight."""
        ...


T = TypeVar("T", bound=Keyed)


class Ahead(Generic[T]):
    """Transfers by key, in the order in which the next call needs them.

    A copy that is dropped unread was made for nothing, as happens where calls of two graphs alternate. The next one of its key is
    then left out, after another the next three, and so on up to 63; the first that is taken over ends that.

    Dictionary steps are single steps of the interpreter: backwards, which hold no lock, may take and drop on their own threads.

    Args:
        leave: called with each transfer that is dropped; what tells whether its memory is still taken, None if that is back
            at once.

    Attributes:
        dropped: how many were dropped so far.
    """

    def __init__(self, leave: Callable[[T], Callable[[], bool] | None]) -> None:
        self.dropped = 0
        self._leave_by = leave
        self._held: dict[str, T] = {}
        # By key: copies left out before the next try, and those still to leave out.
        self._skips: dict[str, tuple[int, int]] = {}
        self._leaving: list[Callable[[], bool]] = []

    def __len__(self) -> int:
        return len(self._held)

    def items(self) -> list[tuple[str, T]]:
        """What is held now."""
        return list(self._held.items())

    def renew(self, key: str) -> bool:
        """Whether a copy of `key` is held already, as another graph's end may have started it; it is now needed last."""
        held = self._held.pop(key, None)
        if held is not None:
            self._held[key] = held
        return held is not None

    def skip(self, key: str) -> bool:
        """Whether the next copy of `key` is to be left out, because the last ones were dropped unread."""
        length, left = self._skips.get(key, (0, 0))
        if left:
            self._skips[key] = length, left - 1
        return left > 0

    def put(self, transfer: T) -> None:
        """Holds `transfer`, which is needed after all that are held."""
        self._held[transfer.key] = transfer

    def take(self, key: str) -> T | None:
        """The transfer of `key`, no longer held; None if there is none."""
        if not self._held:
            return None
        transfer = self._held.pop(key, None)
        if transfer is not None:
            self._skips.pop(key, None)
        return transfer

    def drop_last(self) -> str | None:
        """Drops the transfer that is needed last, for room. Its block returns at once, or when a read that has begun ends.

        Returns:
            Its key; None if none is held.
        """
        try:
            key, transfer = self._held.popitem()
        except KeyError:
            return None
        length, _ = self._skips.get(key, (0, 0))
        length = min(2 * length + 1, _MOST_SKIPPED)
        self._skips[key] = length, length
        self._leave(transfer)
        return key

    def discard(self, key: str) -> bool:
        """Drops the transfer of `key`, whose bytes may no longer be the weight's; False if none is held."""
        transfer = self._held.pop(key, None)
        if transfer is not None:
            self._leave(transfer)
        return transfer is not None

    def _leave(self, transfer: T) -> None:
        self.dropped += 1
        self._forget_returned()
        taken = self._leave_by(transfer)
        if taken is not None:
            self._leaving.append(taken)

    @property
    def leaving(self) -> bool:
        """Whether dropped transfers had not given their memory back when that was last looked at."""
        return bool(self._leaving)

    def settle(self, closed: Callable[[], bool]) -> None:
        """Waits until the blocks of all dropped transfers have come back, at most a read each, or until `closed`."""
        while not closed():
            self._forget_returned()
            if not self._leaving:
                return
            time.sleep(_POLL_S)

    def _forget_returned(self) -> None:
        for taken in list(self._leaving):
            if not taken():
                self._leaving.remove(taken)

    def clear(self) -> None:
        """Drops all of them."""
        self._held.clear()
