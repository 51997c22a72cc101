"""Reads request traces: one JSON object a line, gzip-compressed or plain."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from kvcascade.configs.registry import nearest
from kvcascade.errors import ConfigError

__all__ = ["BUNDLED", "CHUNK_TOKENS", "Request", "Trace"]

CHUNK_TOKENS = 512
"""Tokens that one entry of `hash_ids` stands for; the last entry of a prompt may stand for fewer."""

BUNDLED = {
    name: Path(__file__).parent / "traces" / f"mooncake_{name}.jsonl.gz" for name in ("conversation", "synthetic")
}
"""The traces that are installed with the package, by name."""

_GZIP = b"\x1f\x8b"
_LONGEST_LINE = 16 << 20
_FORMAT = "one JSON object a line, with timestamp, input_length, output_length and hash_ids"


class Request(NamedTuple):
    """One request of a trace."""

    timestamp: float
    """Milliseconds since the start of the trace."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens that were generated."""
    hash_ids: tuple[int, ...]
    """One id a chunk of the prompt, the partial last one included. Equal ids are equal prefixes."""

    def tokens(self, chunks: int) -> int:
        """Prompt tokens in the first so many chunks."""
        return min(chunks * CHUNK_TOKENS, self.input_length)


class Trace:
    """The requests of a trace file, read as they are asked for; each iteration starts anew.

    Args:
        source: a path, or the name of a bundled trace (`BUNDLED`, with or without "mooncake_").
        skip_bad: leave out lines that are broken, and count them, instead of raising.

    Iterating raises `ConfigError` where the file can't be read, holds no request, or has a broken line: the text
    names file, line and what is wrong.
    """

    def __init__(self, source: str | Path, skip_bad: bool = False) -> None:
        self.path = BUNDLED.get(str(source).removeprefix("mooncake_"), Path(source))
        self.name = self.path.name.removesuffix(".gz").removesuffix(".jsonl")
        self.skipped = 0
        """Broken lines that the latest iteration has left out so far."""
        self._skip_bad = skip_bad

    def __iter__(self) -> Iterator[Request]:
        self.skipped = 0
        found = 0
        for number, line in enumerate(self._lines(), 1):
            if line.isspace():
                continue
            try:
                request = _parse(line)
            except ValueError as error:
                if not self._skip_bad:
                    raise ConfigError(self._refusal(number, error, found)) from error
                self.skipped += 1
                continue
            found += 1
            yield request
        if not found:
            raise ConfigError(
                f"{self.path} is not a request trace: none of its lines is a request. Expected {_FORMAT}"
            )

    def _lines(self) -> Iterator[bytes]:
        with self._readable() as file:
            for line in iter(partial(file.readline, _LONGEST_LINE), b""):
                if len(line) == _LONGEST_LINE:
                    raise ConfigError(f"{self.path} is not a request trace: a line is longer than 16 MiB")
                yield line

    @contextmanager
    def _readable(self) -> Iterator[gzip.GzipFile | BufferedReader]:
        try:
            with self.path.open("rb") as raw:
                packed = raw.peek(len(_GZIP)).startswith(_GZIP)
                yield gzip.GzipFile(fileobj=raw) if packed else raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{self.path} is a damaged gzip file: {error}") from error
        except OSError as error:
            hint = (
                ""
                if self.path.suffix
                else f"{nearest(str(self.path), BUNDLED)}; bundled traces: {', '.join(BUNDLED)}"
            )
            raise ConfigError(f"can't read the trace {self.path}: {error.strerror or error}{hint}") from error

    def _refusal(self, number: int, error: ValueError, found: int) -> str:
        if not found:
            return f"{self.path} is not a request trace: line {number}: {error}. Expected {_FORMAT}"
        return f"{self.path}, line {number}: {error}. Fix the line, or leave out such lines with --skip-bad"


def _parse(line: bytes) -> Request:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("is not text") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise ValueError(f"is not a JSON object but {_shown(record)}")
    timestamp = record.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < float("inf"):
        raise ValueError(f"timestamp must be milliseconds since the start, not {_shown(timestamp)}")
    prompt = _whole(record, "input_length", least=1)
    output = _whole(record, "output_length", least=0)
    return Request(timestamp, prompt, output, _hash_ids(record.get("hash_ids"), prompt))


def _whole(record: dict[str, Any], name: str, least: int) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of tokens, {least} or more, not {_shown(value)}")
    return value


def _hash_ids(ids: Any, prompt: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(each) is not int for each in ids):
        raise ValueError(f"hash_ids must be a list of whole numbers, not {_shown(ids)}")
    wanted = -(-prompt // CHUNK_TOKENS)
    if len(ids) != wanted:
        raise ValueError(
            f"hash_ids has {len(ids)} entries, but input_length {prompt} makes {wanted} chunks of {CHUNK_TOKENS}"
        )
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids holds an id twice, but one prompt has no two equal prefixes")
    return tuple(ids)


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
