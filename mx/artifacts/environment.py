"""What compiled code depends on, as named fields: GPU, libraries, interpreter, CPU and compiler.

Nothing here imports torch or starts CUDA: versions and build ids are read from what is installed,
GPUs are asked for through NVML.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from blake3 import blake3

from mx import config
from mx.core.variant import Difference
from mx.hardware.gpus import read_gpus, sm_counts

#: The fields of what runs on the CPU: Inductor compiles with -march=native, and its key of a
#: compiled object has the compiler's whole command line, paths of headers included.
CPU_FIELDS = ("isa", "compiler", "threads", "torch_path", "python_path")
#: Fields of many words, of which only those that differ are named.
_WORDS = ("isa", "configuration")
GPU_FIELDS = ("gpu", "sm", "sm_count", "driver")

_ID_CHARS = 16
_COMPILER_S = 20
#: What -march=native may use, as /proc/cpuinfo names it.
_INSTRUCTIONS = re.compile(
    r"(avx|amx|fma|f16c|bmi|abm|aes|vaes|pclmul|vpclmul|gfni|adx|sha|movbe|sse4|ssse3|popcnt|xop|tbm"
    r"|asimd|sve|neon|crc32|atomics|bf16|i8mm|pmull|fphp|vfp|sme(?!p)).*"
)
_MAX_CHARS = 500


def here(
    engine: str = "",
    fields: Mapping[str, str] | None = None,
    *,
    names: Collection[str] | None = None,
) -> dict[str, str]:
    """Return the environment of this process, by field.

    Args:
        engine: The package of the engine, such as "vllm"; "" for none.
        fields: The caller's own fields, such as `configuration`, `code` and `tp`. They win.
        names: The fields to return, by default all; others are not determined.

    Returns:
        Text by name of field. What is unknown, or is not there, is left out.
    """
    found: dict[str, str] = {}
    for given, read in _READERS:
        if names is None or not set(given).isdisjoint(names):
            found.update(zip(given, read(), strict=True))
    if engine:
        version, build = library(engine)
        place = str(_folder(engine) or "")
        found.update(
            engine=engine, engine_version=version, engine_build=build, engine_path=place
        )  # fmt: skip
    found.update(fields or {})
    return {name: text for name, text in found.items() if text and (names is None or name in names)}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Difference]:
    """Return the fields of `theirs` with which `ours` does not agree.

    Args:
        ours: The environment here.
        theirs: The fields that a set names. Fields that only ours has are not compared.

    Returns:
        Differences with our value first; "" stands for a field that is absent here. Of
        `isa` and `configuration`, the words that only one side has.
    """
    return [
        _difference(name, ours.get(name, ""), theirs[name])
        for name in theirs
        if ours.get(name, "") != theirs[name]
    ]


def _difference(name: str, first: str, second: str) -> Difference:
    if name in _WORDS and first:
        here, there = first.split(), second.split()
        only = [" ".join(each for each in one if each not in other)
                for one, other in ((here, there), (there, here))]  # fmt: skip
        return Difference(name, only[0], only[1])
    return Difference(name, first, second)


def library(package: str) -> tuple[str, str]:
    """Return the version and the build id of an installed package, which is not imported.

    Args:
        package: The name that is imported; it may differ from the distribution's.

    Returns:
        ("", "") if there is none. The id is a hash over the hashes of all its files, as their
        installer listed them; of a package that is run from its sources, over its Python code.
    """
    folder = _folder(package)
    if folder is None:
        return "", ""
    distribution = _distribution(package)
    version = "" if distribution is None else distribution.version
    if distribution is not None and Path(str(distribution.locate_file(package))) == folder:
        start = f"{package}/"
        lines = [
            line
            for line in (distribution.read_text("RECORD") or "").splitlines()
            if line.startswith(start) and ",sha256=" in line
        ]
        if lines:
            text = "\n".join(sorted(lines))
            return version, blake3(text.encode()).hexdigest()[:_ID_CHARS]
    hasher = blake3()
    for file in sorted(folder.rglob("*.py")):
        hasher.update(f"{file.relative_to(folder)}\0".encode())
        hasher.update(blake3(file.read_bytes()).digest())
    return version, hasher.hexdigest()[:_ID_CHARS]


def _distribution(package: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package, [])
        return importlib.metadata.distribution(names[0]) if names else None


def _folder(package: str) -> Path | None:
    """Return the folder that a package would be imported from; nothing is imported to find it."""
    if not package.isidentifier():  # to find a part of a package imports the package
        return None
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module without a spec stands in for it
        return None
    return Path(spec.origin).parent if spec and spec.has_location and spec.origin else None


def _gpus() -> tuple[str, str, str, str]:
    # An empty list hides every GPU, and so the engine computes on the CPU.
    if config.inherited("CUDA_VISIBLE_DEVICES").get("CUDA_VISIBLE_DEVICES", "-") == "":
        return "", "", "", ""
    found = read_gpus()
    if not found.gpus:
        return "", "", "", ""

    def joined(texts: Collection[str]) -> str:
        return " + ".join(sorted(set(texts)))

    # Exactly this one: code for sm_90a runs on 9.0 alone.
    sm = joined([f"sm_{each.compute_capability.replace('.', '')}" for each in found.gpus])
    counts = joined([str(count) for count in sm_counts() if count])
    return joined([each.name for each in found.gpus]), sm, counts, found.driver


def _torch() -> tuple[str, str, str, str]:
    folder = _folder("torch")
    if folder is None:
        return "", "", "", ""
    said: dict[str, str] = {}
    for statement in ast.parse((folder / "version.py").read_text()).body:
        target = (
            statement.target
            if isinstance(statement, ast.AnnAssign)
            else statement.targets[0]
            if isinstance(statement, ast.Assign)
            else None
        )
        value = getattr(statement, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            said[target.id] = str(value.value or "")
    return (
        said.get("__version__", ""), library("torch")[1], said.get("cuda", ""), str(folder)
    )  # fmt: skip


def _python() -> tuple[str, str, str, str]:
    return (
        f"{platform.python_implementation()} {platform.python_version()}",
        sysconfig.get_path("include"),
        f"{sys.platform}-{platform.machine()}",
        " ".join(platform.libc_ver()).strip(),
    )


def _isa() -> tuple[str]:
    found: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found.update(each for each in value.split() if _INSTRUCTIONS.fullmatch(each))
            break
    variables = config.inherited("ATEN_CPU_CAPABILITY")
    text = " ".join([*sorted(found), *(f"{name}={text}" for name, text in variables.items())])
    if len(text) > _MAX_CHARS:  # a field has 512 at most
        text = f"{text[: _MAX_CHARS - 40]} {blake3(text.encode()).hexdigest()[:_ID_CHARS]}"
    return (text,)


def _compiler() -> tuple[str]:
    """Return the version of the compiler that Inductor calls; "" if it can't be called."""
    called = config.inherited("CXX").get("CXX", "g++")
    try:
        said = subprocess.run(
            ["env", "LC_ALL=C", called, "-v"],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_COMPILER_S,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ("",)
    # gcc names its version on the last line, clang on the first.
    lines = [line for line in said.decode(errors="replace").splitlines() if " version " in line]
    return (f"{' '.join(lines[:1]).strip()} {blake3(said).hexdigest()[:_ID_CHARS]}",)


def _threads() -> tuple[str]:
    """Return how many threads torch uses: Inductor writes the number into its code."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return (str(torch.get_num_threads()),)
    given = config.inherited("OMP_NUM_THREADS").get("OMP_NUM_THREADS", "").partition(",")[0]
    return (given if given.isdigit() else str(len(os.sched_getaffinity(0))),)


_READERS: tuple[tuple[tuple[str, ...], Callable[[], tuple[str, ...]]], ...] = (
    (GPU_FIELDS, _gpus),
    (("torch", "torch_build", "cuda", "torch_path"), _torch),
    (("triton", "triton_build"), functools.partial(library, "triton")),
    (("python", "python_path", "platform", "libc"), _python),
    (("isa",), _isa),
    (("compiler",), _compiler),
    (("threads",), _threads),
)
