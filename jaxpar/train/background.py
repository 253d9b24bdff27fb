"""Batches made and placed on a thread, ahead of the step; waiting for one can be broken off."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
LOOK_S = 0.2  # how often a wait looks whether it should end


class Background(Generic[T]):
    """Runs `make()` on a thread, at most `ahead` finished items in advance. Errors of the thread are raised by `next`."""

    def __init__(self, make: Callable[[], Iterator[T]], ahead: int, *, daemon: bool = True):
        """daemon: a source that may hang for ever must not hold up the end of the process; a compilation must, or XLA aborts it."""
        self._queue: queue.Queue[T | BaseException] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make,), name="jaxpar-background", daemon=daemon)
        self._thread.start()

    def next(self, give_up: Callable[[], bool]) -> T | None:
        """The next item; None when `give_up()` turns true while there is none. The end of the items is StopIteration."""
        while True:
            try:
                item = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                if give_up():
                    return None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def close(self) -> None:
        """End the thread; one that is stuck in its source ends with the process."""
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _run(self, make: Callable[[], Iterator[T]]) -> None:
        try:
            for item in make():
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:  # the thread of the loop raises it
            self._put(error)

    def _put(self, item: T | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=LOOK_S)
                return True
            except queue.Full:
                continue
        return False
