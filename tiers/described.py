"""The folder of one namespace, which says in a file what its name stands for."""

from pathlib import Path

from kvcascade.types import Namespace

from .files import read_json

__all__ = ["NAMESPACE_NAME", "DescribedFolder"]

NAMESPACE_NAME = "namespace.json"


class DescribedFolder:
    """Its description is the first that is written and the last that is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = read_json(path / NAMESPACE_NAME) or {}

    @property
    def described(self) -> bool:
        return isinstance(self.description.get("format"), int)

    @property
    def damaged(self) -> bool:
        """Whether there is a description that makes no sense."""
        return not self.described and (self.path / NAMESPACE_NAME).is_file()

    @property
    def format(self) -> int:
        """The version of what lies here; 0 where that is not known."""
        version = self.description.get("format")
        return version if isinstance(version, int) else 0

    @property
    def namespace(self) -> Namespace:
        """As far as it is described."""
        fields = self.description.get("fields")
        named = fields.items() if isinstance(fields, dict) else ()
        return Namespace(tuple((str(name), str(value)) for name, value in named))

    @property
    def tenant(self) -> str:
        """The stack's `namespace`, "" for none."""
        return dict(self.namespace.fields).get("tenant", "")
