"""`kvcascade schema`: what a stack file may say."""

import json

import click


@click.command
def schema() -> None:
    """Prints the JSON Schema of a stack, with all tier types that are installed here."""
    from kvcascade.configs.json_schema import stack_schema

    click.echo(json.dumps(stack_schema(), indent=2))
