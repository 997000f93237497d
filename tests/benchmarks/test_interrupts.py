"""The command that interrupts sessions: real signals leave nothing, and what one would leave is counted."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.streaming import interrupts
from benchmarks.streaming.interrupts import Case, Player
from flashmem import Session
from tests.support.mini_bundle import write_mini_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mini_bundle(tmp_path_factory.mktemp("interrupts") / "m.flashmem").path


def test_signals_leave_nothing(bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    played = [Case("buffer", "map", False, bundle), Case("buffer", "dma", True, bundle)]
    monkeypatch.setattr(interrupts, "cases", lambda name, folder: played)
    with pytest.raises(SystemExit) as ended:
        interrupts.main(["--device", "pocl", "--signals", "16", "--patience", "60"])
    said = capsys.readouterr().out
    by_mode = json.loads(said.splitlines()[-1])["by_mode"]
    found = [Counter[str](counts) for counts in by_mode.values()]
    assert len(found) == 2 and ended.value.code == any(counts["lost"] for counts in found), said
    for counts in found:  # `lost`: in a callback of Python's library
        assert counts["signals"] == 8 and counts["opening"] + counts["run"] + counts["close"] + counts["lost"] == 8, said
        assert not any(counts[what] for what in ("wrong", "failed", "hangs", "bytes", "threads")), said


def test_what_is_left_is_counted(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, kept = threading.Event(), list[Session]()

    def interrupted(session: Session, *arguments: Any, **options: Any) -> Any:
        threading.Thread(target=over.wait, daemon=True).start()
        kept.append(session)
        session.close = lambda: None  # type: ignore[method-assign]
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupts, "LONGEST", 0.05)
    monkeypatch.setattr("sys.unraisablehook", print)
    monkeypatch.setattr(interrupts.Budget, "__init__", interrupts.Budget.__init__)  # which a player replaces
    player = Player(Case("buffer", "map", False, bundle), "pocl", 60, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "run", interrupted)
        player.play()
    over.set()
    assert player.counts["run"] == player.counts["threads"] == 1 and player.counts["bytes"] > 0
    del kept[0].close
    kept[0].close()
