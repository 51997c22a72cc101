"""Tells secrets from other settings, so that none is kept in a file or shown to anyone."""

import re
from typing import Any

__all__ = ["is_secret_name", "mask", "masked", "secret_in_url"]

_MASK = "**********"

_ENDINGS = (
    "password", "passwd", "passphrase", "secret", "token", "accesskey", "accesskeyid", "apikey", "secretkey",
    "privatekey", "credential", "credentials",
)  # fmt: skip
_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/?#\s:@]*:)([^/?#\s]+)(?=@)")
_QUERY = re.compile(r"(://\S*[?&](?:password|passwd|secret|token|api_?key|access_?key)=)([^&#\s]+)", re.IGNORECASE)


def is_secret_name(key: str) -> bool:
    """Whether a setting of this name holds a secret: `password`, `sentinel_password`, `secretAccessKey`; not
    `password_file`, `tokens_per_block`."""
    return re.sub(r"[^a-z]", "", key.lower()).endswith(_ENDINGS)


def secret_in_url(text: str) -> bool:
    """Whether the text holds a URL with a password: `scheme://user:password@host`, `...?password=...`."""
    return bool(_USERINFO.search(text) or _QUERY.search(text))


def mask(text: str) -> str:
    """The text with the passwords of its URLs masked."""
    return _QUERY.sub(rf"\1{_MASK}", _USERINFO.sub(rf"\1{_MASK}", text))


def masked(value: Any, key: str = "") -> Any:
    """The value of a setting for showing: texts whose key names a secret and the passwords of URLs are masked."""
    if isinstance(value, dict):
        return {name: masked(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked(item, key) for item in value)
    if isinstance(value, str):
        return _MASK if value and is_secret_name(key) else mask(value)
    return value
