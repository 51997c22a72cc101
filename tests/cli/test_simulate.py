"""`kvcascade simulate`, as a user calls it."""

import pytest
from click.testing import CliRunner

from kvcascade.cli import main


def test_histories_that_hold() -> None:
    ran = CliRunner().invoke(main, ["simulate", "--seeds", "2", "--steps", "40", "--profile", "plain"])
    assert ran.exit_code == 0
    assert ran.stdout == "2 histories of 40 steps, seeds 0 to 1: everything held.\n"


def test_an_unknown_profile() -> None:
    ran = CliRunner().invoke(main, ["simulate", "--profile", "calmer"])
    assert ran.exit_code == 2
    assert "'calmer' is not a profile; did you mean 'calm'?" in ran.stderr
    assert "all, calm, faults, disk, drafts, plain" in ran.stderr


@pytest.mark.parametrize("option", ["--seeds", "--steps"])
def test_numbers_out_of_range(option: str) -> None:
    assert CliRunner().invoke(main, ["simulate", option, "0"]).exit_code == 2


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcascade.connector.requests.written_tokens", lambda request, scheduled: 0)
    ran = CliRunner().invoke(main, ["simulate", "--seeds", "3", "--steps", "60", "--profile", "plain"])
    assert ran.exit_code == 1
    assert ran.stderr.startswith("seed 0: BrokenInvariantError: ")
    assert "The shortest history found" in ran.stderr and "  add(" in ran.stderr
    assert "kvcascade simulate --seed 0 --seeds 1 --steps 60 --profile plain" in ran.stderr
