"""`jaxpar COMMAND CONFIG [key=value ...]`: the commands, and what each kind of error means for the exit status.

0 done; 2 the input is wrong (the message, no traceback); 3 a check failed or the run stopped on numbers that are not finite; 75
preempted, run the same command to go on; 130 stopped by Ctrl-C. JAXPAR_TRACEBACK=1 shows where an error came from.
"""

import os
import sys
import traceback
from typing import cast

import typer

from jaxpar.cli.doctor import doctor
from jaxpar.cli.eval import evaluate
from jaxpar.cli.report import report
from jaxpar.cli.sample import sample
from jaxpar.cli.schedule import schedule
from jaxpar.cli.train import train
from jaxpar.train.signals import INTERRUPTED

WRONG_INPUT, CHECK_FAILED = 2, 3
# Newer typer carries a copy of click, older ones import it: what typer itself exports is right in both.
USAGE_ERROR = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train large models: the same maths under every layout.",
)
app.command()(train)
app.command("eval")(evaluate)
app.command()(sample)
app.command()(schedule)
app.command()(report)
app.command()(doctor)


def main() -> None:
    """Entry point of the console script."""
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a thread that still compiles or waits for data must not keep a stopped run alive
    sys.exit(0)


def run(arguments: list[str]) -> int:
    """Exit status of a command line."""
    try:
        result = app(arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except USAGE_ERROR as error:
        error.show()
        return WRONG_INPUT
    except (typer.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        return _explain(error, WRONG_INPUT)
    except RuntimeError as error:
        from jaxpar.train.errors import RunStoppedError

        if not isinstance(error, RunStoppedError):
            raise
        return _explain(error, CHECK_FAILED)


def _explain(error: Exception, code: int) -> int:
    if os.environ.get("JAXPAR_TRACEBACK"):
        traceback.print_exception(error)
        return code
    foreign = not type(error).__module__.startswith("jaxpar.")
    print(f"error: {error}{'  (JAXPAR_TRACEBACK=1 shows where)' if foreign else ''}", file=sys.stderr)
    return code
