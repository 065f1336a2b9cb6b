"""`valkyrie-train`: what there is to import is imported where Ctrl-C already ends it without a traceback."""

from __future__ import annotations

from valkyrie.processes.interrupt import ends_at_once, usable_streams


def main() -> None:
    """Run `valkyrie-train` with the arguments of the process."""
    usable_streams()
    with ends_at_once("valkyrie-train"):
        from valkyrie.cli.dispatch import dispatch

        dispatch()


if __name__ == "__main__":
    main()
