"""Builds the stand-in driver (libcuda.so.1, libnvidia-ml.so.1, libcufile.so.0), and starts programs
over it.

`standin.h` says what it does and how it is set. The headers and cuda-bindings come from PyPI, in a
folder for each major of CUDA that `make setup-gpu` fills: this module takes them from there.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.driver import kernels

MAJORS = (12, 13)
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]
#: Where the wheels of each major have cuda.h.
_HEADERS = {12: "nvidia/cuda_runtime/include", 13: "nvidia/cu13/include"}
_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O2", "-g"]
_SHARED = ["-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
_NVML = ("nvml.c", "settings.c")
#: In a folder of its own: it is there where the setting CUFILE is.
_CUFILE = "gds/libcufile.so.0"


def packages(major: int) -> Path:
    """Return the folder that `make setup-gpu` installs cuda-bindings of this major into.

    Args:
        major: The major version of CUDA.
    """
    return _ROOT / f".venv-gpu{major}"


def why_not(major: int) -> str:
    """Return why the stand-in can't be built and used here, "" if it can be.

    Args:
        major: The major version of CUDA.
    """
    if compiler() is None:
        return "there is no C compiler (cc, or what CC names)"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for needed in (f"{_HEADERS[major]}/cuda.h", f"cuda/bindings/driver{suffix}"):
        if not (packages(major) / needed).exists():
            return f"{packages(major).name} has no {needed} (make setup-gpu)"
    return ""


def compiler() -> str | None:
    """Return the path of the C compiler, None if there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


@functools.cache
def build(major: int) -> Path:
    """Build the libraries for one major, once for each process.

    Args:
        major: The major version of CUDA.

    Returns:
        The folder that they are in, for LD_LIBRARY_PATH. It is removed when the process ends.

    Raises:
        subprocess.CalledProcessError: The compiler refuses them; it has said why on stderr.
    """
    folder = tempfile.TemporaryDirectory(prefix="mx-standin-")
    _folders.append(folder)
    others = ("nvml.c", "cufile.c")
    sources = {
        "libcuda.so.1": sorted(p.name for p in _HERE.glob("*.c") if p.name not in others),
        "libnvidia-ml.so.1": _NVML,
        _CUFILE: ("cufile.c",),
    }
    (Path(folder.name) / _CUFILE).parent.mkdir()
    include = f"-isystem{packages(major) / _HEADERS[major]}"
    for library, names in sources.items():
        command = [compiler() or "cc", *_FLAGS, *_SHARED, include, *names]
        soname = library.rpartition("/")[2]
        command += [f"-Wl,-soname,{soname}", "-o", str(Path(folder.name) / library), "-ldl"]
        if library == _CUFILE:
            command += [f"-L{folder.name}", "-l:libcuda.so.1"]
        subprocess.run(command, cwd=_HERE, check=True)
    return Path(folder.name)


@functools.cache
def kernels_library(capability: int, extra: tuple[kernels.Image, ...] = ()) -> Path:
    """Build the library of mx's kernels for a compute capability, once for each process.

    Args:
        capability: Times ten: 90 is 9.0.
        extra: More kernels of the same capability (`kernels.compiled`).

    Returns:
        Its path; the cubins lie beside it, as NAME.cubin. They are removed when the process ends.

    Raises:
        LocalError: Triton is missing or can't compile the kernels.
        subprocess.CalledProcessError: The compiler refuses them; it has said why on stderr.
    """
    folder = tempfile.TemporaryDirectory(prefix="mx-standin-")
    _folders.append(folder)
    source = Path(folder.name) / f"kernels_{capability}.c"
    images = [*kernels.digests(capability), *extra]
    source.write_text(kernels.source(images))
    for image in images:
        source.with_name(f"{image.name}.cubin").write_bytes(image.cubin)
    library = source.with_suffix(".so")
    command = [
        compiler() or "cc",
        *_FLAGS,
        *_SHARED,
        f"-I{_HERE}",
        str(source),
        "-o",
        str(library),
        "-lm",
    ]
    subprocess.run(command, check=True)
    return library


_folders: list[tempfile.TemporaryDirectory[str]] = []


def environment(major: int, settings: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return the environment of a Python program that finds the stand-in.

    Args:
        major: The major version of CUDA.
        settings: Settings of the stand-in by their names after MX_STANDIN_; True is "1", and for
            KERNELS the library of mx's kernels for the GPUs' compute capability.

    Returns:
        This process's environment with LD_LIBRARY_PATH, PYTHONPATH and the settings.
    """
    ours = ("MX_STANDIN_", "CUDA_VISIBLE_DEVICES")
    found = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    folders = [str(build(major)), found.get("LD_LIBRARY_PATH")]
    if "CUFILE" in (settings or {}):
        folders.insert(0, str((build(major) / _CUFILE).parent))
    found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    found["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), str(packages(major))])
    settings = dict(settings or {})
    if settings.get("KERNELS") is True:
        settings["KERNELS"] = kernels_library(int(str(settings.get("COMPUTE_CAPABILITY", 90))))
    for name, value in settings.items():
        found[f"MX_STANDIN_{name}"] = "1" if value is True else str(value)
    return found
