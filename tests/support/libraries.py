"""Small shared libraries that look as if they had kernels."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.driver.build import compiler


def library(path: Path, build_id: str, kernels: str = "kernels") -> Path:
    """Compile a shared library with a build id ("0xab", or "none") and kernels, and return it."""
    source = path.with_suffix(".c")
    section = 'section(".nv_fatbin"), used'
    text = f'const char kernels[] __attribute__(({section})) = "{kernels}";' if kernels else ""
    source.write_text(text + "\nint one(void) { return 1; }\n")
    note = f"-Wl,--build-id={build_id}"
    subprocess.run([compiler() or "cc", "-shared", note, source, "-o", path], check=True)
    return path
