"""A GPU in use, and what is had of it: each object owns one thing and gives it back in `close`.

Closing is idempotent and may come in any order: a device's context stays until the device and
everything made of it are closed. What is dropped without being closed is given back when it is
collected; what is left at the interpreter's end goes with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator

from mx.cuda.driver import DeviceAttribute, Driver
from mx.cuda.errors import GONE_CODES, CudaError
from mx.errors import ClosedError, ConfigError

DEVICE_PREFIX = "cuda:"
