"""One cold load of safetensors files into host tensors, in a process of its own: prints its seconds
and its processor time as a JSON object.

    python -m benchmarks.disk_load WAY FILE...

Cold: the files' pages in the cache are dropped before the clock starts. Imports are not timed, and
more memory than is needed is touched and freed just before (see `harness`).

- *mx.load*, *mx.pull*: as users call them, without a coordinator; every byte is verified.
- *preadv*: two threads read spans of 4 MiB with O_DIRECT into private memory, in huge pages where
  the kernel gives some, and hash each MiB with blake3. Tensors are views of it. No place is chosen
  and no digest is kept.
- *fastsafetensors*: its loader without GDS, which verifies nothing.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import harness

_MIB = 1 << 20
_SPAN = 4 * _MIB
_ALIGNMENT = 4096
_THREADS = 2
#: How much memory is touched, as a multiple of the files: of just as much, the kernel took other
#: pages in 1 of 3 loads, and those cost 0.6 s a GB where a hypervisor takes free memory back.
_TOUCHED = 4


def _preadv(files: list[Path]) -> object:
    from blake3 import blake3

    kept: list[object] = []
    for path in files:
        nbytes = path.stat().st_size
        room = mmap.mmap(-1, -(-nbytes // _SPAN) * _SPAN, flags=mmap.MAP_PRIVATE)
        room.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(room)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

        def read(at: int, fd: int = fd, view: memoryview = view, nbytes: int = nbytes) -> None:
            end = min(at + _SPAN, nbytes)
            if os.preadv(fd, [view[at : -(-end // _ALIGNMENT) * _ALIGNMENT]], at) != end - at:
                raise OSError("the disk gave fewer bytes than were asked for")
            for start in range(at, end, _MIB):
                blake3(view[start : min(start + _MIB, end)]).digest()

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, range(0, nbytes, _SPAN)))
        os.close(fd)
        kept.append(_tensors(view, path))
    return kept


def _tensors(view: memoryview, path: Path) -> dict[str, Any]:
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
    header_nbytes = int.from_bytes(view[:8], "little")
    header = json.loads(bytes(view[8 : 8 + header_nbytes]))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + header_nbytes + at for at in entry["data_offsets"])
            flat = torch.frombuffer(view[begin:end], dtype=dtypes[entry["dtype"]])
            found[name] = flat.view(entry["shape"])
    return found


def _load(files: list[Path]) -> object:
    import mx

    return mx.load("bench", path=_folder(files))


def _pull(files: list[Path]) -> object:
    import mx

    pull = mx.pull("bench", path=_folder(files))
    pull.wait()
    return pull, pull.state_dict()


def _folder(files: list[Path]) -> Path:
    return files[0] if len(files) == 1 else files[0].parent


def _fastsafetensors(files: list[Path]) -> object:
    fast = importlib.import_module("fastsafetensors")
    loader = fast.SafeTensorsFileLoader(fast.SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: [str(path) for path in files]})
    buffers = loader.copy_files_to_device()
    return loader, buffers, {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}


#: All that a pull from disk imports: `main` checks that.
_OURS = ("torch", "mx.api.pulling", "mx.fetching.whole", "mx.memory.tensors")

#: What each way imports, and what it does.
WAYS: dict[str, tuple[tuple[str, ...], Callable[[list[Path]], object]]] = {
    "mx.load": (_OURS, _load),
    "mx.pull": (_OURS, _pull),
    "preadv": (("torch", "blake3"), _preadv),
    "fastsafetensors": (("torch", "fastsafetensors"), _fastsafetensors),
}


def main() -> None:
    """Load once, and print what it took."""
    way, *names = sys.argv[1:]
    files = [Path(name) for name in names]
    modules, load = WAYS[way]
    for module in modules:
        importlib.import_module(module)
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    harness.touch(_TOUCHED * sum(path.stat().st_size for path in files))
    imported = set(sys.modules)
    cpu_s, began_s = time.process_time(), time.perf_counter()
    kept = load(files)
    told = {"seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}
    late = {each for each in sys.modules.keys() - imported if each.startswith("mx.")}
    assert kept
    assert not late, f"imported while the clock ran: {late}"
    print(json.dumps(told), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
