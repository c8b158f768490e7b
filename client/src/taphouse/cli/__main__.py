"""`python -m taphouse.cli` is the `taphouse` command."""

from taphouse.cli.main import main

main()
