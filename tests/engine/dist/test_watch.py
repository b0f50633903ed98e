"""News of a rank that has gone reaches whoever waits, or ends the process."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.dist.control import RankError
from engine.dist.group import Group
from engine.dist.launch import _news
from engine.dist.watch import Watch

ROOT = Path(__file__).parents[3]


def test_the_rank_that_failed_is_told_not_those_that_lost_it() -> None:
    watch = Watch()
    try:
        watch.check()
        watch.report(RankError("rank 2: connection closed"), 0)
        threading.Timer(0.1, watch.report, (RankError("rank 1 was ended by SIGKILL"), 2)).start()
        with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"):
            watch.check()
        assert str(watch.explain(RuntimeError("broken pipe"))) == "rank 1 was ended by SIGKILL"
    finally:
        watch.close()


def test_a_broken_exchange_without_news_says_so() -> None:
    watch = Watch()
    try:
        told = watch.explain(RuntimeError("Connection reset by peer"))
        assert "the connection between ranks broke: Connection reset by peer" in str(told)
    finally:
        watch.close()


def test_a_wait_that_takes_too_long_aborts_the_exchanges_and_is_raised() -> None:
    watch, aborted = Watch(timeout=0.2), threading.Event()
    watch.on_failure(aborted.set)
    try:
        with watch.waiting():
            assert aborted.wait(5.0)
        with pytest.raises(RankError, match="no answer from the other ranks"):
            watch.check()
        with watch.waiting():
            pass
    finally:
        watch.close()


def test_a_process_that_hears_nothing_is_ended_with_the_news() -> None:
    """The main thread sits in a call that no exception reaches."""
    code = (
        "import threading, engine.dist.watch as w; w.PATIENCE_S = 0.3\n"
        "watch = w.Watch()\n"
        "watch.report(w.RankError('rank 1 was ended by SIGSEGV', 'look there', 1), 2)\n"
        "threading.Event().wait(60)"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "error: rank 1 was ended by SIGSEGV\nhint: look there\n"
    assert time.monotonic() - begin < 30.0


def test_a_closed_watch_lets_the_process_live() -> None:
    watch = Watch(timeout=0.05)
    watch.close()
    with watch.waiting():
        time.sleep(0.6)
    watch.report(RankError("late"), 2)
    watch.check()


def test_what_a_processs_end_means() -> None:
    killed, weight = _news(1, -9, b"")
    assert (str(killed), weight) == ("rank 1 was ended by SIGKILL", 2)
    silent, weight = _news(2, 3, b"")
    assert (str(silent), weight) == ("rank 2 ended with exit code 3", 1)
    report = (
        b'{"error": "too little memory", "hint": "h", "exit_code": 2, "lost_peer": false, '
        b'"traceback": "Traceback: here"}'
    )
    told, weight = _news(3, 1, report)
    assert (str(told), told.hint, told.exit_code, weight) == (
        "rank 3: too little memory",
        "h",
        2,
        2,
    )
    assert told.__notes__ == ["Traceback: here"]
    assert _news(3, 1, report.replace(b"false", b"true"))[1] == 0


def test_a_start_that_breaks_is_explained_by_who_broke_it() -> None:
    """What gloo or NCCL say of a rank that was killed is not the news; an own error stays."""
    watch = Watch()
    group = Group(watch=watch)
    try:
        with pytest.raises(RuntimeError, match="CUDA error"), group.starting():
            raise RuntimeError("CUDA error")
        with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"), group.starting():
            watch.report(RankError("rank 1 was ended by SIGKILL"), 2)
            raise RuntimeError("Connection closed by peer")
    finally:
        watch.close()
