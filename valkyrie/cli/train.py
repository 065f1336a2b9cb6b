"""Starts `valkyrie-train`. Installs the Ctrl-C handler before heavy imports, so that Ctrl-C never shows a traceback."""

from __future__ import annotations

from valkyrie.processes.ending import limit_failed_exit
from valkyrie.processes.interrupt import exit_on_ctrl_c, repair_std_streams


def main() -> None:
    """Entry point of `valkyrie-train`.

    If the run fails and the interpreter's exit then hangs, forces the process to exit (see `limit_failed_exit`).
    """
    with limit_failed_exit():
        run()


def run() -> None:
    """Run `valkyrie-train` with `sys.argv`, without the forced exit of `main`. For callers such as tests."""
    repair_std_streams()
    with exit_on_ctrl_c("valkyrie-train"):
        from valkyrie.cli.dispatch import dispatch

        dispatch()


if __name__ == "__main__":
    main()
