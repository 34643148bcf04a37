"""The picture of a traced round of commands (`benchmarks.swarm_trace`)."""

import json
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import swarm_trace

ORIGIN, A, B = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"


def write_trace(path: Path, *reads: tuple[str, int, float, float | None]) -> None:
    """Write the trace of a command that looked up at 100.5 and ended at 104."""
    trace = {
        "ended_s": 104.0,
        "cpu_s": 1.0,
        "hashed_s": 0.1,
        "spans": [["pull.locate", "started", 100.5], ["pull.locate", "completed", 100.6]],
        "reads": reads,
        "sent": {"request": 3},
        "heard": {"allow": 2, "reject": 1},
        "answers": [["allow", 0.02], ["reject", 0.9]],
    }
    path.write_text(json.dumps(trace))


def test_it_shows_each_hosts_reads_and_rates(tmp_path: Path) -> None:
    failed = (B, 2, 102.0, None)
    # Two parts of one chunk are one bar.
    write_trace(tmp_path / "a.json", (ORIGIN, 0, 101, 102), (ORIGIN, 0, 101.5, 103), failed)
    write_trace(tmp_path / "b.json", (ORIGIN, 1, 101, 102), (A, 0, 103, 104))
    links = {"origin": [0, 0], "a": [0, 0], "b": [0, 0]}
    samples = [
        [100 + n, {name: [n * 1e6, n * 1e6] for name in links}, [2 * n, n, 0], {"origin": n / 10}]
        for n in range(5)
    ]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    picture = swarm_trace.picture(tmp_path, ["a", "b"], ORIGIN.partition(":")[0], 250)
    root = ElementTree.fromstring(picture)
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"origin", "a", "b", "cores", "4 s"} <= set(texts)
    assert "6 messages for 2 chunks, a slot after 20 ms" in texts[-1]
    fills = [each.get("fill") for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    # One each is the legend's.
    assert fills.count(swarm_trace.ORIGIN) == 3
    assert fills.count(swarm_trace.PEER) == 2
    assert fills.count(swarm_trace.IDLE) == 2
