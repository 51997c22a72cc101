"""The example of docs/connector.md runs as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "connector.md"


def test_the_smallest_engine_runs() -> None:
    if not PAGE.exists():
        pytest.skip("the docs are in the source tree only")
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
