"""The identity of a namespace."""

import subprocess
import sys

import pytest

from kvcascade.types import Namespace

FIELDS = {"model": "m", "revision": "1", "dtype": "bf16", "layout": "NHD", "tp": 2, "group": 0, "salt": ""}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_that_differs_makes_another_namespace(name: str) -> None:
    """vllm-project/vllm#49261."""
    other = Namespace.of(**{**FIELDS, name: "other"})
    assert other.digest != Namespace.of(**FIELDS).digest
    assert other.stamp("mark") != Namespace.of(**FIELDS).stamp("mark")


def test_the_same_text_in_other_places_is_another_namespace() -> None:
    """Parts are tagged and length-prefixed (vllm-project/vllm#44701)."""
    digests = {
        Namespace.of(lora="X").digest,
        Namespace.of(salt="X").digest,
        Namespace.of(loraX="").digest,
        Namespace.of(lora="", X="").digest,
        Namespace.of(a="b", c="d").digest,
        Namespace.of(a="bc", d="").digest,
        Namespace.of(ab="c", d="").digest,
        Namespace.of(a="b" + "c" + "d").digest,
    }
    assert len(digests) == 8


def test_a_mark_makes_another_stamp_and_is_not_taken_for_a_field() -> None:
    namespace = Namespace.of(model="m")
    stamps = {namespace.stamp(""), namespace.stamp("a"), namespace.stamp("b"), namespace.digest}
    assert len(stamps) == 4
    assert namespace.stamp("a") != Namespace.of(model="m", mark="a").digest


def test_the_order_of_the_fields_does_not_matter() -> None:
    assert Namespace.of(a=1, b=2) == Namespace.of(b=2, a="1")


def test_digests_are_the_same_in_every_process() -> None:
    """vllm-project/vllm#51875; LMCache/LMCache#1095: nothing depends on a process's own hash seed."""
    code = "from kvcascade.types import Namespace; print(Namespace.of(model='m', tp=2).stamp('x').hex())"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert printed == {Namespace.of(model="m", tp=2).stamp("x").hex() + "\n"}
