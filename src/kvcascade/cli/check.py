"""`kvcascade check`: would this stack start?"""

from typing import TYPE_CHECKING

import click

from kvcascade.errors import ConfigError, TierError

from .options import SIZE

if TYPE_CHECKING:
    from kvcascade.configs import StackSettings
    from kvcascade.tiers import Probe


@click.command
@click.argument("stack")
@click.option("--chunk-bytes", type=SIZE, help="Also say how many chunks of this size each tier holds.")
@click.option(
    "--vllm-model", metavar="MODEL", help="Also print what tells this model's chunks from others' under vLLM."
)
def check(stack: str, chunk_bytes: int | None, vllm_model: str | None) -> None:
    """Validates a stack and looks, without changing anything, whether its tiers would start here.

    It works beside a running engine. It prints the stack with every default, without secrets, and what it found of
    each tier. Exit code 2, with the reasons, where the stack would not start.
    """
    from kvcascade.configs import load_stack, resolved

    settings = load_stack(stack)
    click.echo(resolved(settings))
    probes = _probe(settings, chunk_bytes)
    _print(settings, probes, chunk_bytes)
    if vllm_model:
        _print_identity(vllm_model)
    problems = [
        f"{stack}: tiers[{place}] ({tier.name}): {problem}"
        for place, (tier, probe) in enumerate(zip(settings.tiers, probes, strict=True))
        for problem in probe.problems
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    click.echo("This stack would start.")


def _probe(settings: "StackSettings", chunk_bytes: int | None) -> "list[Probe]":
    from kvcascade.tiers import Probe, TierSettings
    from kvcascade.tiers.host import HostSettings

    probes = []
    for tier in settings.tiers:
        if not isinstance(tier, HostSettings | TierSettings):
            raise ConfigError(f"the tier type {tier.type!r} can't be probed: its settings are no TierSettings")
        try:
            probes.append(tier.probe(chunk_bytes))
        except (ConfigError, TierError) as error:
            probes.append(Probe(problems=[str(error)]))
    return probes


def _print_identity(model: str) -> None:
    from kvcascade.connector.vllm.fingerprint import Unknown
    from kvcascade.connector.vllm.identity import ADDED_AT_START, parts_of_model

    from .output import print_table

    try:
        parts = parts_of_model(model)
    except Unknown as unknown:
        raise ConfigError(
            f"--vllm-model: {unknown}; give a folder, or a name where vLLM and its models are installed"
        ) from unknown
    added = [(name, f"(at start) {what}") for name, what in ADDED_AT_START.items()]
    print_table(("part of the namespace", "value"), [sorted(parts.items()), added])


def _print(settings: "StackSettings", probes: "list[Probe]", chunk_bytes: int | None) -> None:
    from kvcascade.configs.units import format_size

    from .output import print_table

    sections = []
    for tier, probe in zip(settings.tiers, probes, strict=True):
        facts = [*probe.facts]
        if chunk_bytes:
            chunks = "no bound" if probe.chunks is None else f"{probe.chunks:,}"
            facts.append((f"chunks of {format_size(chunk_bytes)}", chunks))
        names = [tier.name, *[""] * len(facts)]
        sections.append([(name, *fact) for name, fact in zip(names, facts or [("", "")], strict=False)])
    print_table(("tier", "", ""), sections)
