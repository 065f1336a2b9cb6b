"""Starts `valkyrie-data`. Installs the Ctrl-C handler before heavy imports, so that Ctrl-C never shows a traceback."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.processes.interrupt import exit_on_ctrl_c


def main(argv: Sequence[str] | None = None) -> None:
    """Run `valkyrie-data` with `argv`, or with the arguments of the process if it is None."""
    with exit_on_ctrl_c("valkyrie-data"):
        from valkyrie.cli.data_commands import run

        run(argv)


if __name__ == "__main__":
    main()
