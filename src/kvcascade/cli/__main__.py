"""`python -m kvcascade.cli`."""

from kvcascade.cli import main

main(prog_name="kvcascade")
