"""What holds for every test: it leaves no file descriptor, thread or shared memory behind."""

from kvcascade.testing import no_leaks

__all__ = ["no_leaks"]
