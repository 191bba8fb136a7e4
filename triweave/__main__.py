"""`python -m triweave`."""

from triweave.cli import main

main()
