"""What can be done to a training: a fault is a small class and an entry of FAULTS."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from loadtest.load.target import LOOPBACK
from loadtest.training.scene import Scene

COORDINATOR = "coordinator"
LEASES = (1.3, 2.0)
"""How long a frozen worker stays so, in leases."""
LIES_TOLD, LIE_S = 2, 120.0
"""Updates of a saboteur, and how long it may take to hand them in."""


class Fault(ABC):
    """One kind of fault: it begins, lasts, and ends."""

    name: ClassVar[str]
    words: ClassVar[str]
    weight: ClassVar[int] = 1
    """How often it comes, beside the others."""
    length_s: ClassVar[tuple[float, float]]
    """Shortest and longest."""

    def absent(self, profile: str, codec: str) -> str:
        """Why it cannot be done on these links, or where updates travel so; empty when it can."""
        return ""

    def targets(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        return workers

    def scaled_s(self, length_s: float, lease_s: float) -> float:
        """How long one of this length lasts, where a lease lasts so long."""
        return length_s

    @abstractmethod
    def begin(self, scene: Scene, target: str) -> None: ...

    def hold(self, scene: Scene, target: str) -> None:
        """Called again and again while it lasts: what would not last by itself."""
        return

    def over(self, scene: Scene, target: str) -> bool:
        """Whether it need not last any longer."""
        return False

    @abstractmethod
    def end(self, scene: Scene, target: str) -> None: ...


class Kill(Fault):
    name, words, weight, length_s = "kill", "a worker gets SIGKILL, and starts again later", 3, (1.0, 4.0)

    def begin(self, scene: Scene, target: str) -> None:
        scene.stand.workers[target].kill()

    def end(self, scene: Scene, target: str) -> None:
        scene.stand.workers[target].start()


class Freeze(Fault):
    """It wakes up in a world that went on, and does not know it."""

    name, words, weight, length_s = "freeze", "a worker gets SIGSTOP for longer than its lease", 2, LEASES

    def scaled_s(self, length_s: float, lease_s: float) -> float:
        return length_s * lease_s

    def begin(self, scene: Scene, target: str) -> None:
        scene.stand.workers[target].freeze()

    def end(self, scene: Scene, target: str) -> None:
        scene.stand.workers[target].thaw()


class Cut(Fault):
    name, words, weight, length_s = "cut", "a worker's link is cut in the middle of a transfer", 2, (3.0, 8.0)

    def absent(self, profile: str, codec: str) -> str:
        return "" if profile != LOOPBACK else "loopback has no link to cut: --profile names one that has"

    def begin(self, scene: Scene, target: str) -> None:
        scene.wait_for_transfer(target)
        scene.stand.set_cut(target, True)

    def end(self, scene: Scene, target: str) -> None:
        scene.stand.set_cut(target, False)


class Twin(Fault):
    name, words, length_s = "twin", "a second process works with a worker's name and a copy of its state", (10.0, 15.0)

    def begin(self, scene: Scene, target: str) -> None:
        scene.start_twin(target)

    def end(self, scene: Scene, target: str) -> None:
        scene.end_other(target)


class OldState(Fault):
    """As after a restored backup."""

    name, words, length_s = "old-state", "a worker is killed, and starts again with a state from long ago", (0.5, 2.0)

    def begin(self, scene: Scene, target: str) -> None:
        scene.stand.workers[target].kill()
        scene.put_back(target)

    def end(self, scene: Scene, target: str) -> None:
        scene.stand.workers[target].start()


class Sabotage(Fault):
    """Somebody who means harm has a worker's place for some rounds."""

    length_s = (LIE_S, LIE_S)
    lie: ClassVar[str]

    def absent(self, profile: str, codec: str) -> str:
        return "" if codec == "fp32" else f"a saboteur speaks fp32, and updates travel as {codec}"

    def begin(self, scene: Scene, target: str) -> None:
        scene.stand.workers[target].kill()
        scene.start_saboteur(target, self.lie, LIES_TOLD)

    def over(self, scene: Scene, target: str) -> bool:
        return scene.others[target].ended is not None

    def end(self, scene: Scene, target: str) -> None:
        scene.end_other(target)
        scene.stand.workers[target].start()


class NotANumber(Sabotage):
    name, words, lie = "nan", "a saboteur in a worker's place hands in updates of NaN", "nan"


class Absurd(Sabotage):
    name, words, lie = "absurd", "a saboteur hands in updates a thousand times too long", "absurd"


class Scaled(Sabotage):
    name, words, lie = "scaled", "a saboteur hands in updates five times too long", "scaled"


class Flipped(Sabotage):
    name, words, lie = "flipped", "a saboteur hands in updates that point back", "flipped"


class CoordinatorKill(Fault):
    name, words, weight = "coordinator", "the coordinator gets SIGKILL, and starts again later", 3
    length_s = (0.5, 4.0)

    def targets(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        return (COORDINATOR,)

    def begin(self, scene: Scene, target: str) -> None:
        scene.stand.coordinator.kill()

    def end(self, scene: Scene, target: str) -> None:
        scene.stand.coordinator.start()


class FullDisk(Fault):
    """Without a disk of its own, none of the coordinator's files may grow: it hears of another error (EFBIG)."""

    name, words, length_s = "disk", "the coordinator's disk is full", (5.0, 10.0)

    def targets(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        return (COORDINATOR,)

    def begin(self, scene: Scene, target: str) -> None:
        if scene.stand.disk is None:
            scene.stand.coordinator.limit_files(0)
            scene.notes.append("no file can grow: RLIMIT_FSIZE, EFBIG")
        else:
            scene.notes.append("no room on a tmpfs of its own: ENOSPC")
            scene.stand.disk.fill()

    def hold(self, scene: Scene, target: str) -> None:
        """What the coordinator has removed meanwhile is room, too."""
        if scene.stand.disk is not None:
            scene.stand.disk.fill()

    def end(self, scene: Scene, target: str) -> None:
        if scene.stand.disk is None:
            scene.stand.coordinator.limit_files(None)
        else:
            scene.stand.disk.free()


_ALL = (Kill(), Freeze(), Cut(), Twin(), OldState(), NotANumber(), Absurd(), Scaled(), Flipped(), CoordinatorKill())
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in (*_ALL, FullDisk())}
