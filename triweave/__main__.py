"""`python -m triweave`, and the command `triweave`."""

from __future__ import annotations

import sys

from triweave.recovery.stop import put_off


def main() -> None:
    """Run the command line; a stop signal to `train` waits from here on until it is read."""
    if sys.argv[1:2] == ["train"]:
        put_off()
    from triweave.cli import main as run

    run()


if __name__ == "__main__":
    main()
