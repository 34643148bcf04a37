"""Fakes that each break one rule of the suite and no other: the suite's own test.

Each mistake is one that a real transport could make.
"""

from tests.support.broken import content, faults, life, paths, places, secrecy
from tests.support.broken.base import BROKEN, BrokenFake

__all__ = ["BROKEN", "BrokenFake", "content", "faults", "life", "paths", "places", "secrecy"]
