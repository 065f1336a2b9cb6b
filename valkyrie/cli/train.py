"""`valkyrie-train`. Heavy imports come after Ctrl-C has a handler, so that it never shows a traceback."""

from __future__ import annotations

from valkyrie.processes.interrupt import exit_on_ctrl_c, repair_std_streams


def main() -> None:
    """Run `valkyrie-train` with the arguments of the process."""
    repair_std_streams()
    with exit_on_ctrl_c("valkyrie-train"):
        from valkyrie.cli.dispatch import dispatch

        dispatch()


if __name__ == "__main__":
    main()
