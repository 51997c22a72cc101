"""Plain data out of YAML text or out of a mapping: each key with its line, `${}` replaced, nothing validated yet.

Scalars are read as YAML 1.2's core schema has them: `yes`, `on`, `12:30` and dates are text. Anchors, aliases and
tags are refused: a stack file says each thing where it stands.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import yaml

from .environment import is_reference, literal_part, substitute
from .masking import is_secret_name, secret_in_url

__all__ = ["Document", "KeyPath", "Problem", "key_text", "read_mapping", "read_yaml"]

KeyPath: TypeAlias = tuple[str | int, ...]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KINDS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _KINDS}
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)(e[-+]?[0-9]+)?|[-+]?\.inf|\.nan")


class Problem(NamedTuple):
    """Something that the user must change. Sorts by where it stands."""

    line: int
    """From 1; 0 where there are no lines."""
    path: str
    text: str

    def located(self, source: str) -> str:
        """One line for a person: `stack.yaml:7: tiers[1].path: ...`."""
        where = f"{source}:{self.line}" if self.line else source
        text = self.text.replace("\n", " ")
        return f"{where}: {self.path}: {text}" if self.path else f"{where}: {text}"


def key_text(path: KeyPath) -> str:
    """`tiers[1].capacity`; a key that is no plain word stands in quotes."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{_word(part)}" for part in path).removeprefix(".")


def _word(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key) else repr(key[:40])


@dataclass
class Document:
    """What a stack's source says."""

    source: str
    data: Any = None
    problems: list[Problem] = field(default_factory=list)
    replaced: dict[KeyPath, str] = field(default_factory=dict)
    """The text that `${}` gave for a whole scalar, for keys that want text where it reads as a number, say."""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    _accused: set[KeyPath] = field(default_factory=set)

    def line(self, path: KeyPath) -> int:
        """The line of a key, or of what it would stand in."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)

    def complain(self, path: KeyPath, text: str) -> None:
        """Notes a problem with a key; of each key the first one only, since others follow from it."""
        if path not in self._accused:
            self._accused.add(path)
            self.problems.append(Problem(self.line(path), key_text(path), text))


def read_yaml(text: str, source: str) -> Document:
    """Reads YAML text. Text that isn't YAML makes a document of one problem."""
    document = Document(source)
    try:
        root = yaml.compose(text, Loader=_LOADER)
        if root is not None:
            document.data = _Nodes(document).read(root, ())
    except yaml.YAMLError as error:
        document.problems = [_syntax(error, text)]
    except RecursionError:
        document.problems = [Problem(1, "", "nested too deeply to be a stack")]
    return document


def read_mapping(data: Mapping[str, Any], source: str) -> Document:
    """Reads a mapping that Python code gives, with the same rules."""
    document = Document(source)
    try:
        document.data = _from_python(document, data, ())
    except RecursionError:
        document.problems = [Problem(0, "", "nested too deeply to be a stack")]
    return document


class _Nodes:
    """Turns YAML nodes into plain data."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._seen: set[int] = set()

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        lines = self._document.lines
        lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._seen:
            self._document.complain(path, "an alias (*name) can't be used here; write the value out")
            return None
        self._seen.add(id(node))
        if node.tag not in _TAGS:
            self._document.complain(
                path, "a tag (!name) can't be used here; put a text that begins with ! in quotes"
            )
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, place)) for place, item in enumerate(node.value)]
        quoted = getattr(node, "style", None) or node.tag.endswith(":str")
        return _text(self._document, node.value, path, typed=not quoted)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._document.problems.append(Problem(line, key_text(path), "a key must be a text"))
                continue
            key = key_node.value
            inner = (*path, key)
            if key in result:
                before = self._document.lines[inner]
                self._document.problems.append(Problem(line, key_text(inner), f"also given in line {before}"))
                continue
            self._document.lines[inner] = line
            result[key] = self.read(value_node, inner)
        return result


def _from_python(document: Document, value: Any, path: KeyPath) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _from_python(document, item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_from_python(document, item, (*path, place)) for place, item in enumerate(value)]
    if isinstance(value, str):
        return _text(document, value, path, typed=False)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        document.complain(path, "expected a number of less than 64 bits")
        return None
    if value is None or isinstance(value, bool | int | float):
        if value is not None and _holds_secret(path):
            document.complain(path, _literal_secret(path))
        return value
    document.complain(
        path, f"expected text, a number, true, false, a list or a mapping, not {type(value).__name__}"
    )
    return None


def _text(document: Document, text: str, path: KeyPath, *, typed: bool) -> Any:
    """The value of a scalar. Where it is `typed`, or one `${}` alone, it is read as YAML reads a plain one."""
    literal = literal_part(text)
    if _holds_secret(path) and _scalar(literal) is not None:
        document.complain(path, _literal_secret(path))
        return None
    if secret_in_url(literal):
        document.complain(path, "holds a URL with a literal password; take it from the environment: ${NAME}")
        return None
    try:
        value = substitute(text)
        value.encode()
    except UnicodeEncodeError:
        document.complain(path, "is not UTF-8 text")
        return None
    except ValueError as error:
        document.complain(path, str(error))
        return None
    if is_reference(text):
        document.replaced[path] = value
        return _scalar(value)
    return _scalar(value) if typed and value == text else value


def _holds_secret(path: KeyPath) -> bool:
    """Whether the key is a secret's, or a list's under such a key."""
    return next((is_secret_name(part) for part in reversed(path) if isinstance(part, str)), False)


def _literal_secret(path: KeyPath) -> str:
    key = next(part for part in reversed(path) if isinstance(part, str))
    return f"a secret must not stand in a stack; take it from the environment, {key}: ${{NAME}}, or from a file"


def _scalar(text: str) -> Any:
    """A plain scalar's value."""
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(word):
        return float(word.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _syntax(error: yaml.YAMLError, text: str) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem(1, "", "not YAML: it holds characters that YAML does not allow")
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    problem = error.problem or "not understood"
    if "cannot start any token" in problem and "\t" in text.split("\n")[line - 1]:
        return Problem(line, "", "a tab: YAML is indented with spaces")
    if "alias" in problem:  # its name may be a secret that begins with *
        return Problem(line, "", "an alias (*name) can't be used here; put a text that begins with * in quotes")
    if "single document" in (error.context or ""):
        return Problem(line, "", "a second document (---); a file holds one stack")
    context = f"{error.context}, " if error.context else ""
    hint = "; inside { } and [ ], put ${...} in quotes" if "flow" in context else ""
    return Problem(line, "", f"not YAML: {context}{problem}{hint}")
