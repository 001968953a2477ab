"""The durable store: killed at any moment it loses nothing, and damage is noticed."""

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import trainer.rounds.store
from stages.errors import CheckpointError, InputError, ResumeError
from tests.trainer.small import tensors, update
from trainer.blocks.config import RoundSettings
from trainer.blocks.state import digest
from trainer.rounds.ledger import Ledger
from trainer.rounds.store import DATABASE, UPDATES, VERSIONS, Store, audit, open_store

SETTINGS = RoundSettings(quorum=1.0, down_codec="int8", stale_discount=1.0)

RUN = """
import os, signal, sys
from pathlib import Path
from tests.trainer.small import tensors, update
from trainer.rounds import store
from trainer.rounds.store import audit
from trainer.rounds.ledger import Ledger
from trainer.blocks.config import RoundSettings
from trainer.blocks.state import digest
from trainer.rounds.codecs import norm

directory = Path(sys.argv[1])
settings = RoundSettings(quorum=1.0, down_codec="int8", stale_discount=1.0, robust="scored")


def loss(weights):
    '''Shorter is better: of the two workers one shortens the weights, and is merged.'''
    return [norm(weights) * (1 + i / 10) for i in range(8)]


def run() -> str:
    with store.open_store(directory) as opened:
        ledger = Ledger(settings, {"p": tensors(0)}, opened, "run")
        while (number := ledger.round("p")) < 2:
            for worker in range(2):
                delta = tensors(0, 0.1 - 0.2 * worker)
                assert ledger.accept(update(number, worker, delta=delta), 1.0).kind in ("accepted", "duplicate")
            ledger.close("p", 1.0, lambda part, round_: loss)
        return digest(ledger.weights("p"))


def events():
    database = store.connect(directory / "rounds.sqlite3")
    tables = database.execute("SELECT name FROM sqlite_master WHERE name = 'events'").fetchall()
    found = database.execute("SELECT COUNT(*) FROM events").fetchone()[0] if tables else 0
    database.close()
    return found


def call(function, kill_at=-1, kill_after_s=0.0):
    '''In a child that kills itself before its kill_at-th change of the disk, or at any instruction after a time.'''
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        changes = 0

        def count(*_):
            nonlocal changes
            changes += 1
            if changes == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        def hook(event, arguments):
            if event in ("os.rename", "os.remove", "os.mkdir", "os.truncate") or (
                event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            ):
                count()

        def connected(path, connect=store.connect):
            database = connect(path)
            database.set_trace_callback(count)  # before each statement, BEGIN and COMMIT too
            return database

        sys.addaudithook(hook)
        os.fsync = lambda handle, real=os.fsync: (count(), real(handle))[1]
        store.connect = connected
        kept = os.dup(write)
        if kill_after_s:
            signal.setitimer(signal.ITIMER_REAL, kill_after_s)  # SIGALRM ends a process that does not handle it
        result = function()
        signal.setitimer(signal.ITIMER_REAL, 0)
        with os.fdopen(kept, "w") as out:
            out.write(result)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as results:
        result = results.read()
    _, status = os.waitpid(child, 0)
    if status and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGALRM)):
        sys.exit("the child failed")
    return result


def check(again, undisturbed, what):
    assert again == undisturbed, what
    found = audit(directory)
    assert not found.problems, (what, found.problems)
    assert (found.accepted, found.merged, found.left_out, found.pending) == (4, 2, 2, 0), (what, found)


if __name__ == "__main__":
    import random
    import shutil
    import time

    every, drawn = int(sys.argv[2]), random.Random(0)
    undisturbed = call(run)
    first, tried = 1, 0
    while True:  # one change out of each `every` that follow each other
        kill_at, first = first + drawn.randrange(every), first + every
        shutil.rmtree(directory)
        if call(run, kill_at):  # it came to its end first
            break
        tried += 1
        if (directory / "rounds.sqlite3").exists() and events():
            problems = audit(directory).problems
            assert not problems, (kill_at, problems)
        again = call(run, kill_at + 7)  # and once more, soon after
        check(again or call(run), undisturbed, kill_at)
    shutil.rmtree(directory)
    begin_s = time.monotonic()
    call(run)
    lasts_s = time.monotonic() - begin_s
    for _ in range(int(sys.argv[3])):
        shutil.rmtree(directory, ignore_errors=True)
        again = call(run, kill_after_s=drawn.uniform(0.001, lasts_s))
        check(again or call(run), undisturbed, "at any instruction")
    print(tried)
"""


CHANGES = 60
"""Changes of the disk in one run, at least."""
KILL_EVERY, KILLS = (1, 200) if os.environ.get("ONESWEEP_KILLS") == "all" else (6, 20)
WITHIN_S = 500.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_at_any_moment_ends_in_the_same_weights(tmp_path: Path) -> None:
    """A process dies before a change of the disk and again a little later, or at any instruction."""
    found = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "rounds"), str(KILL_EVERY), str(KILLS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) >= CHANGES // KILL_EVERY


def begun(store: Store) -> Ledger:
    return Ledger(SETTINGS, {"p": tensors(0)}, store, "run")


def fill(directory: Path, rounds: int = 2) -> str:
    with open_store(directory) as store:
        ledger = begun(store)
        for number in range(rounds):
            for worker in range(2):
                ledger.accept(update(number, worker), 1.0)
            ledger.close("p", 1.0)
        ledger.accept(update(rounds, 0), 1.0)
        return digest(ledger.weights("p"))


def test_a_stored_run_is_resumed(tmp_path: Path) -> None:
    before = fill(tmp_path)
    with open_store(tmp_path) as store:
        ledger = Ledger(SETTINGS, {"p": tensors(0)}, store, "run", now_s=1000.0)
        assert (ledger.round("p"), digest(ledger.weights("p"))) == (2, before)
        assert ledger.accept(update(2, 0), 1001.0).kind == "duplicate"
        assert ledger.difference("p", 2)
        assert not ledger.due("p", 1001.0)
        ledger.accept(update(2, 1), 1001.0)
        assert ledger.close("p", 1002.0).updates == ("w0-2", "w1-2")
    found = audit(tmp_path)
    assert (found.problems, found.accepted, found.merged, found.versions) == ([], 6, 6, {"p": 3})


def own_digest(path: Path) -> str:
    """SHA-256 over names in order, shapes, kinds and bytes, by code that shares nothing with the store's."""
    found = hashlib.sha256()
    for name, array in sorted(load_file(path).items()):
        found.update(f"{name} {tuple(array.shape)} torch.{array.dtype.name}\n".encode() + array.tobytes())
    return found.hexdigest()


def test_an_independent_reader_and_the_command_find_every_update_once(
    tmp_path: Path, onesweep: Callable[..., Any]
) -> None:
    fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        events = [json.loads(text) for (text,) in database.execute("SELECT record FROM events ORDER BY number")]
    taken = {event["id"]: event for event in events if event["kind"] == "accepted"}
    closed = [event for event in events if event["kind"] == "closed"]
    assert sorted(name for event in closed for name in event["updates"]) == ["w0-0", "w0-1", "w1-0", "w1-1"]
    assert taken.keys() == {"w0-0", "w0-1", "w1-0", "w1-1", "w0-2"}
    assert own_digest(tmp_path / UPDATES / "p" / "w0-2.safetensors") == taken["w0-2"]["sha256"]
    assert own_digest(tmp_path / VERSIONS / "p" / "2.safetensors") == closed[-1]["sha256"]
    whole = onesweep("train", "audit", tmp_path)
    line = "5 updates accepted: 4 merged, 1 pending; 0 late and dropped; p at version 2\n"
    assert (whole.code, whole.out) == (0, line)
    (tmp_path / UPDATES / "p" / "w0-2.safetensors").unlink()
    lost = onesweep("train", "audit", tmp_path)
    assert lost.code == 1
    assert lost.out.startswith("wrong: ")


def test_another_run_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_store(tmp_path) as store:
        with pytest.raises(ResumeError, match="belong to a run with other settings"):
            Ledger(SETTINGS, {"p": tensors(0)}, store, "another")
        with pytest.raises(ResumeError, match="began with other weights"):
            Ledger(SETTINGS, {"p": tensors(1)}, store, "run")
        with pytest.raises(ResumeError, match="another process is using the rounds"), open_store(tmp_path):
            pass
        (whole,) = store.database.execute("SELECT record FROM events WHERE number = 3").fetchone()
        for damaged in ("{}", "[]", '{"norm": "1"}', '{"after_s": NaN}', '{"weight": {}}', '{"beside": {"p": "x"}}'):
            record = {**json.loads(whole), **json.loads(damaged)} if len(damaged) > 2 else json.loads(damaged)
            store.database.execute("UPDATE events SET record = ? WHERE number = 3", (json.dumps(record),))
            with pytest.raises(ResumeError, match=r"has an event that makes no sense \(.*\); restore"):
                begun(store)


def test_a_full_disk_loses_no_accepted_update(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ledger = begun(store)
        ledger.accept(update(0, 0), 1.0)
        (pages,) = store.database.execute("PRAGMA page_count").fetchone()
        store.database.execute(f"PRAGMA max_page_count = {pages}")
        losses = {f"loss_{i}": float(i) for i in range(1000)}  # more than its last page has room for
        with pytest.raises(CheckpointError, match=r"cannot write .* full; free some space"):
            ledger.accept(update(0, 1, losses=losses), 1.0)
        assert [record["kind"] for record in store.records()] == ["run", "accepted"]
        store.database.execute("PRAGMA max_page_count = 10000")
        assert ledger.accept(update(0, 1, losses=losses), 2.0).kind == "accepted"
        assert ledger.close("p", 2.0).updates == ("w0-0", "w1-0")
    assert audit(tmp_path).problems == []


def test_a_damaged_database_or_file_is_reported(tmp_path: Path) -> None:
    fill(tmp_path / "lost")
    (tmp_path / "lost" / DATABASE).write_bytes(b"")
    with open_store(tmp_path / "lost") as store, pytest.raises(ResumeError, match="no events, but next to it"):
        begun(store)
    fill(tmp_path)
    (pending,) = (tmp_path / UPDATES / "p").iterdir()
    content = bytearray(pending.read_bytes())
    content[-1] ^= 1
    pending.write_bytes(content)
    assert "does not match rounds.sqlite3" in audit(tmp_path).problems[0]
    newest = tmp_path / VERSIONS / "p" / "2.safetensors"
    newest.unlink()
    assert any("cannot read" in problem for problem in audit(tmp_path).problems)
    with open_store(tmp_path) as store, pytest.raises(ResumeError, match="needs; restore a copy of the"):
        begun(store)
    (tmp_path / DATABASE).write_bytes(b"x" * 8192)
    assert "is damaged" in audit(tmp_path).problems[0]
    with pytest.raises(ResumeError, match="is damaged"), open_store(tmp_path):
        pass
    with pytest.raises(InputError, match="give the folder `rounds` of a coordinator's --out"):
        audit(tmp_path / "nowhere")
    (tmp_path / "locked" / DATABASE).mkdir(parents=True)
    os.mkfifo(tmp_path / "locked" / "fifo")
    with pytest.raises(CheckpointError, match="fifo is not a regular file"):
        trainer.rounds.store.connect(tmp_path / "locked" / "fifo")
    with pytest.raises(InputError, match=r"cannot read .*: unable to open database file; run this as the user of"):
        audit(tmp_path / "locked")


def test_the_database_refuses_duplicates(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ledger = begun(store)
        ledger.accept(update(0, 0), 1.0), ledger.accept(update(0, 1), 1.0)
        ledger.close("p", 1.0)
        taken, closed = store.records()[1], store.records()[-1]
        for twice in (taken, {**taken, "id": "another"}, closed, {**closed, "round": 1}, store.records()[0]):
            with pytest.raises(CheckpointError, match="UNIQUE constraint failed"):
                store.commit(twice)
    found = audit(tmp_path)
    assert (found.problems, found.accepted, found.merged) == ([], 2, 2)


DROPPED = {"kind": "dropped", "part": "p", "id": "a", "worker": "w", "round": 0}
CLOSED = {"kind": "closed", "part": "p", "round": 0, "updates": [], "sha256": ""}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (DROPPED, "a of p was dropped although it was not late"),
        ({**CLOSED, "round": 3}, "round 3 of p was closed when round 0 was due"),
        ({**CLOSED, "updates": ["x"]}, "round 0 of p merged x, which had not been accepted"),
    ],
)
def test_the_audit_finds_events_that_break_the_rules(tmp_path: Path, record: dict[str, Any], problem: str) -> None:
    with open_store(tmp_path) as store:
        begun(store)
        store.commit(record)
    assert problem in audit(tmp_path).problems


def test_new_folders_are_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As are those that a kill left behind before that."""
    directory, synced = tmp_path / "out" / "rounds", list[Path]()
    (directory / UPDATES / "p").mkdir(parents=True)
    monkeypatch.setattr(trainer.rounds.store, "sync", synced.append)
    with open_store(directory) as store:
        ledger = begun(store)
        synced.clear()
        ledger.accept(update(), 1.0)
    assert {directory, directory / UPDATES, directory / UPDATES / "p"} <= set(synced)
