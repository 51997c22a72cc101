"""The package as authors of tiers import it."""

import subprocess
import sys

import kvcascade.testing


def test_every_public_name_is_there() -> None:
    for name in kvcascade.testing.__all__:
        assert getattr(kvcascade.testing, name) is not None
    assert kvcascade.testing.__all__ == sorted(
        kvcascade.testing.__all__, key=lambda name: (not name.isupper(), name)
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(kvcascade.testing, "TierConformence")


def test_only_what_needs_pytest_asks_for_it() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from kvcascade.testing import bytes_for, FaultTier, forbid_io\n"
        "assert 'hypothesis' not in sys.modules and 'torch' not in sys.modules\n"
        "from kvcascade.testing import TierConformance\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr.strip().endswith(
        "ImportError: kvcascade.testing.conformance needs pytest and hypothesis: pip install 'kvcascade[dev]'"
    )
