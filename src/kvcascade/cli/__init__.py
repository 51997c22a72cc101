"""The command line, `kvcascade`. A command's module is imported when it is called.

Exit codes: 0 fine; 2 what the user gave can't be used; 1 anything else went wrong; 130 interrupted.
"""

from difflib import get_close_matches
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

from kvcascade import __version__
from kvcascade.errors import ConfigError, KVCascadeError

__all__ = ["main"]

_COMMANDS = {
    "check": "Validate a stack, and look whether its tiers would start.",
    "replay": "Play a request trace through a stack.",
    "ls": "Show what each tier of a stack holds.",
    "inspect": "Show the facts of one chunk.",
    "verify": "Check that the bytes of what a stack holds are right.",
    "gc": "Remove what is of no use any more, or what is asked for.",
    "clear": "Remove what the tiers of a stack hold.",
    "export": "Write what the tiers of a stack hold into a file.",
    "import": "Put the chunks of such a file into a tier.",
    "warm": "Fill the tiers above from one below, before an engine starts.",
    "schema": "Print the JSON Schema of a stack.",
    "simulate": "Play random histories of an engine, and check everything.",
}


class _Commands(click.Group):
    """Finds `NAME` in `kvcascade.cli.NAME`, and turns errors into messages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        if name not in _COMMANDS:
            near = "".join(f" (did you mean {match!r}?)" for match in get_close_matches(name, _COMMANDS, n=1))
            ctx.fail(f"no such command {name!r}{near}; allowed: {', '.join(_COMMANDS)}")
        module = f"{name}_" if iskeyword(name) else name
        command: click.Command = getattr(import_module(f"kvcascade.cli.{module}"), module)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVCascadeError as error:
            click.echo(error, err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except KeyboardInterrupt:
            ctx.exit(130)
        except click.Abort as error:  # a question that got no answer
            ctx.exit(130 if isinstance(error.__context__, KeyboardInterrupt) else 1)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvcascade")
def main() -> None:
    """A multi-tier KV cache for LLM engines: GPU, host memory, disk, Redis and S3 as one stack.

    STACK is a YAML file, or the name of a stack that ships: embedded, host-only, host-redis, minio, shared-fs,
    full.
    """
