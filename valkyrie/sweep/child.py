"""The process of a trial: `python -m valkyrie.sweep.child FOLDER` runs FOLDER/run.yaml and writes outcome.json.

Errors are logged with their traceback and summarised in `outcome.json`. The file also states the reason if the process
exits on a signal, because of the watchdog, or because another process is lost. It is missing if the operating system or
the compiler kills the process.

The second argument `beside` marks a process that is not process 0 of its trial. Such a process writes no outcome.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from valkyrie.config.modes import run_mode
from valkyrie.config.run import Run
from valkyrie.extensions import describe_user_error
from valkyrie.foreign_errors import is_out_of_memory
from valkyrie.problems import ProblemError
from valkyrie.processes.ending import on_process_end
from valkyrie.processes.interrupt import exit_on_ctrl_c
from valkyrie.runs.folder import saved_config
from valkyrie.search import NO_STEP_TIME
from valkyrie.sweep.members import WORKER_ARGUMENT
from valkyrie.sweep.results import Outcome, failed_outcome, outcome_from_exit_status, outcome_from_results
from valkyrie.sweep.trial import Status
from valkyrie.train.room import DoesNotFitError


def main() -> None:
    """Run the trial in the folder named by the first argument. Exits with status 1 unless the trial is ok."""
    folder = Path(sys.argv[1])
    with (
        on_process_end(lambda status, reason: _write_outcome(outcome_from_exit_status(status, reason), folder)),
        exit_on_ctrl_c("trial"),
    ):
        outcome = capture_outcome(lambda: _run_mode(folder))
    _write_outcome(outcome, folder)
    sys.exit(int(outcome.status is not Status.ok))


def capture_outcome(work: Callable[[], Outcome], log: TextIO | None = None) -> Outcome:
    """Call `work` and return its outcome, or convert its exception to an outcome.

    The status is `does_not_fit` if memory is exceeded, `refused` for other ValueErrors and OSErrors, except those
    that a user's module raises, and `failed` for other exceptions. Prints the traceback to `log`, or to stderr if `log`
    is None.
    """
    try:
        return work()
    except Exception as error:
        traceback.print_exc(file=log)
        if isinstance(error, DoesNotFitError):
            return Outcome(Status.does_not_fit, str(error))
        if is_out_of_memory(str(error)) and not isinstance(error, ValueError | OSError):
            return replace(failed_outcome(f"{type(error).__name__}: {error}"), status=Status.does_not_fit)
        if user_error := describe_user_error(error):
            return failed_outcome(user_error)
        if isinstance(error, ValueError | OSError):  # the user's mistakes, as in a single run
            problems = error.problems if isinstance(error, ProblemError) else ()
            reason = " ".join(line.strip() for line in str(error).splitlines())
            return Outcome(Status.refused, reason, problems=tuple(problem.to_record() for problem in problems))
        return failed_outcome(f"{type(error).__name__}: {error}")


def _run_mode(folder: Path) -> Outcome:
    run = Run.from_config(saved_config(folder))
    status = run_mode(run)
    if status not in (0, NO_STEP_TIME):
        return outcome_from_exit_status(status, f"the process exited with status {status}")
    return Outcome(Status.ok) if sys.argv[2:] == [WORKER_ARGUMENT] else outcome_from_results(folder, run)


def _write_outcome(outcome: Outcome, folder: Path) -> None:
    if sys.argv[2:] != [WORKER_ARGUMENT]:
        outcome.write(folder)


if __name__ == "__main__":
    main()
