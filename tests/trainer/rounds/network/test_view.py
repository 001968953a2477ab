from __future__ import annotations

from trainer.rounds.view import lines_of, size
from trainer.v1 import rounds_pb2


def test_a_run_is_two_tables() -> None:
    part = rounds_pb2.PartStatus(name="block-0", round=3, replicas=2, present=1, arrived=1, seconds_left=4.4)
    part.losses["denoise_nats"] = 2.25
    late = rounds_pb2.WorkerStatus(
        worker="ann", doing=rounds_pb2.DOING_TRAINING, round=2, steps=7, late=True, accepted=2
    )
    gone = rounds_pb2.WorkerStatus(worker="bob", replica=1, gone=True, silent_seconds=61, refused=1)
    update = rounds_pb2.WatchUpdate(
        run="0123456789abcdef",
        state=rounds_pb2.RUN_STATE_RUNNING,
        rounds=9,
        parts=[part],
        workers=[late, gone],
        received_bytes=1500,
        sent_bytes=2_000_000,
        problem="the disk is full",
    )
    assert lines_of(update) == [
        "run 0123456789ab  running  9 rounds  1.5 kB of updates in, 2 MB of weights out",
        "problem: the disk is full",
        "",
        "part     round  in  workers  left  published  losses",
        "block-0  3/9    1   1/2      4 s   -          denoise 2.250",
        "",
        "worker  part  does          round  steps  silent  taken          busy  losses",
        "ann     0.0   trains, late  2      7      0 s     2              0 s",
        "bob     0.1   gone          0      0      61 s    0 (1 refused)  0 s",
    ]


def test_names_hold_no_commands_for_the_terminal() -> None:
    worker = rounds_pb2.WorkerStatus(worker="\x1b[2Jx")
    assert "?[2Jx" in lines_of(rounds_pb2.WatchUpdate(workers=[worker]))[-1]


def test_sizes_are_for_people() -> None:
    assert [size(count) for count in (0, 999, 1000, 12_345_678, 5 * 10**12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 MB",
        "5 TB",
    ]
