"""What a person sees of a run: a header, progress (a bar on a terminal, else a line every few seconds), evaluations, the end."""

import sys
import time
from collections.abc import Callable
from typing import Protocol

from jaxpar.core.records import Row
from jaxpar.train.experts import experts_note
from jaxpar.train.summary import Facts

LINE_EVERY_S = 5.0


class Display(Protocol):
    """All that the loop tells."""

    def line(self, text: str) -> None: ...

    def header(self, title: str, facts: Facts) -> None: ...

    def start(self, first_step: int, steps: int) -> None: ...

    def step(self, step: int, loss: float, tokens_per_s: float, note: str) -> None: ...

    def row(self, row: Row) -> None: ...

    def stop(self) -> None: ...


class Quiet:
    """Tells nothing."""

    def line(self, text: str) -> None: ...

    def header(self, title: str, facts: Facts) -> None: ...

    def start(self, first_step: int, steps: int) -> None: ...

    def step(self, step: int, loss: float, tokens_per_s: float, note: str) -> None: ...

    def row(self, row: Row) -> None: ...

    def stop(self) -> None: ...


def reading(display: Display) -> Callable[[str, int], None]:
    """What `Parts.progress` wants: a line every few seconds while text is tokenised, none where that is quick."""
    said_s = time.monotonic()

    def tell(source: str, num_tokens: int) -> None:
        nonlocal said_s
        if (now := time.monotonic()) - said_s >= LINE_EVERY_S:
            said_s = now
            display.line(f"reading {source}: {num_tokens:,} tokens so far")

    return tell


class ConsoleDisplay:
    """With rich, on standard output."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._progress = None
        self._task = None
        self._said_s = 0.0
        self._first, self._steps, self._began_s = 0, 0, 0.0

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def header(self, title: str, facts: Facts) -> None:
        from rich.table import Table

        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for what, words in facts:
            table.add_row(what, words)
        self.console.print(table)

    def start(self, first_step: int, steps: int) -> None:
        self._first, self._steps, self._began_s = first_step, steps, time.monotonic()
        if not self.console.is_terminal:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")]
        times = [TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")]
        self._progress = Progress(*columns, *times, console=self.console)
        self._task = self._progress.add_task("", total=steps, completed=first_step)
        self._progress.start()

    def step(self, step: int, loss: float, tokens_per_s: float, note: str) -> None:
        words = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s{note and '  '}{note}"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=words)
        elif (now := time.monotonic()) - self._said_s >= LINE_EVERY_S or step in (self._first + 1, self._steps):
            self._said_s = now
            left_s = (now - self._began_s) / max(step - self._first, 1) * (self._steps - step)
            self.line(f"step {step}/{self._steps}  {words}  {left_s:.0f} s left")

    def row(self, row: Row) -> None:
        if "eval_loss" in row:
            note = experts_note(row, "eval_")
            self.line(f"step {row['step']}: evaluation loss {row['eval_loss']:.4f}{note and ', '}{note} ({row['eval_s']:.1f} s)")
        if row.get("skipped"):
            self.line(f"step {row['step']}: not finite (loss {row['loss']}, gradient norm {row['grad_norm']}): skipped")

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
