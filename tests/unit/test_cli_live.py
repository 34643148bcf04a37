from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mx.cli import live
from mx.core.progress import LayerProgress, Progress

layers = st.lists(
    st.builds(
        lambda name, nbytes, part, ready: LayerProgress(
            name, nbytes, nbytes if ready else int(nbytes * part), ready
        ),
        st.text(max_size=60),
        st.integers(0, 1 << 40),
        st.floats(0, 1),
        st.booleans(),
    ),
    max_size=80,
)


@given(layers, st.integers(-5, 60))
def test_groups_hold_every_layer_once_and_fit(shown: list[LayerProgress], rows: int) -> None:
    groups = live.groups_of(shown, rows)
    assert len(groups) <= max(1, min(rows, live.MAX_ROWS))
    assert sum(done for _, done, _, _, _ in groups) == sum(s.done_nbytes for s in shown)
    assert sum(total for _, _, total, _, _ in groups) == sum(s.nbytes for s in shown)
    assert sum(ready for _, _, _, ready, _ in groups) == sum(s.ready for s in shown)
    assert sum(count for _, _, _, _, count in groups) == len(shown)


@given(layers)
def test_any_snapshot_is_drawn_within_the_terminal(shown: list[LayerProgress]) -> None:
    console = Console(width=80, height=24, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    progress = Progress(5, 9, 1, len(shown), tuple(shown), "reading")
    with console.file:
        console.print(live.render(progress, 1.0, rows=18))
        text = console.export_text()
    assert len(text.splitlines()) <= live.MAX_ROWS + 1
    assert "reading" in text
    assert all(len(line) <= 80 for line in text.splitlines())
