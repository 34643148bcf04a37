"""Fakes that each break one rule of the suite and no other: the suite's own test.

Each mistake is one that a real transport could make.
"""

from mx.testing.broken import content, faults, life, paths, places, secrecy
from mx.testing.broken.base import BROKEN, BrokenFake

__all__ = ["BROKEN", "BrokenFake", "content", "faults", "life", "paths", "places", "secrecy"]
