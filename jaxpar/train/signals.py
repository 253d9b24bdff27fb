"""Being asked to stop: Ctrl-C, SIGTERM, SIGUSR1 set a flag that the loop looks at between steps.

A Python signal handler waits until the main thread is back in Python, which a compilation of minutes delays. The C part of
the handler runs at once: it writes the signal's number into a pipe (`signal.set_wakeup_fd`) that a thread reads. While the
loop cannot act (start-up, first compilation) that thread ends the process itself: nothing is lost, for nothing was done.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType

PREEMPTED = 75  # exit status: run the same command to go on (EX_TEMPFAIL)
INTERRUPTED = 130  # exit status of a second Ctrl-C
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 5.0  # start-up: time that the main thread has to notice before the thread ends the process
DOUBLE_S = 0.5  # wrappers pass Ctrl-C on to a child that got it from the terminal too: two within this time are one


class StopSignals:
    """Context manager around a run; nothing happens to signals outside it. Works in the main thread only (Python's rule)."""

    def __init__(self) -> None:
        self.reason: str | None = None  # name of the first signal
        self._asked = threading.Event()
        self._loop_acts = False
        self._last_interrupt_s: float | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self._asked.is_set()

    def loop_acts(self) -> None:
        """From now on the loop looks at `requested` often, and saves."""
        self._loop_acts = True

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous = {number: signal.signal(number, _noticed) for number in SIGNALS}
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="jaxpar-signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._previous:
            return
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._previous = {}
        os.close(self._write_fd)

    def _listen(self) -> None:
        while numbers := os.read(self._read_fd, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._on_signal(number)
        os.close(self._read_fd)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._stop_at_once_if_repeated()
        if self._asked.is_set():
            return
        self.reason = signal.Signals(number).name
        self._asked.set()
        if self._loop_acts:
            _say(f"{self.reason}: saving after this step (Ctrl-C again: stop at once, without saving)")
        else:
            threading.Thread(target=self._end_start_up, daemon=True).start()

    def _stop_at_once_if_repeated(self) -> None:
        now, before = time.monotonic(), self._last_interrupt_s
        self._last_interrupt_s = now
        if before is not None and now - before > DOUBLE_S:
            _say("Ctrl-C again: stopped without saving; the checkpoints already written are whole")
            os._exit(INTERRUPTED)

    def _end_start_up(self) -> None:
        time.sleep(GRACE_S)
        if not self._loop_acts:
            _say(f"{self.reason}: stopped before the first step, nothing to save; run the same command to go on")
            os._exit(PREEMPTED)


def _noticed(number: int, frame: FrameType | None) -> None:
    """Python's part of the handler: nothing, the thread does it."""


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"\n{text}", file=sys.stderr, flush=True)
