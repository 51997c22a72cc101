"""`${NAME}` and `${NAME:-default}` in a text."""

import os
import re

__all__ = ["is_reference", "literal_part", "substitute"]

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def substitute(text: str) -> str:
    """The text with its references replaced. As in a shell, a default also stands in for an empty variable. What
    a variable holds is taken as it is: a reference inside it is not replaced again.

    Raises:
        ValueError: a variable is not set, or a `${` begins no reference; the text says which.
    """
    if "${" in _REFERENCE.sub("", text):
        raise ValueError("'${' must begin ${NAME} or ${NAME:-default}")
    unset = sorted({name for name, default in _REFERENCE.findall(text) if not default and name not in os.environ})
    unset = [name for name in unset if f"${{{name}}}" in text]
    if unset:
        which = f"variable {unset[0]} is" if len(unset) == 1 else f"variables {', '.join(unset)} are"
        raise ValueError(f"the environment {which} not set; set it, or give a default: ${{{unset[0]}:-default}}")
    return _REFERENCE.sub(lambda match: os.environ.get(match[1]) or match[2] or "", text)


def is_reference(text: str) -> bool:
    """Whether the whole text is one reference."""
    return _REFERENCE.fullmatch(text) is not None


def literal_part(text: str) -> str:
    """What the file itself says: the text with each reference replaced by its default, or by nothing."""
    return _REFERENCE.sub(lambda match: match[2] or "", text)
