"""`python -m neatpack` is the `neatpack` command."""

from neatpack.cli import main

main()
