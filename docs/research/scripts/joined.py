"""Faults of machines that joined a run, in real processes on this machine, while two clients ask for texts.

    python docs/research/scripts/joined.py MODEL FOLDER SEED MINUTES

MODEL: what `onesweep serve` takes. FOLDER: of the processes' states and logs; replaced. Each fault hits one machine,
two, or `serve`; the next comes once the ring is whole again. Ends with an error for a wrong text, a ring that is not
whole after 200 s, or a process that ended by itself.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from serving.client.client import Client
from stages.errors import OnesweepError
from stages.wire.tls import Tls

MACHINES, SEEDS, TOKENS, WHOLE_S = 4, 8, 48, 200.0
FAULTS = ("kill", "kill", "leave", "freeze", "freeze", "two", "serve killed", "serve ended")
PAUSES_S = 1, 5, 20, 75  # shorter and longer than the minute after which others take over
PORT = 17_000

model, folder, seed, minutes = (
    Path(sys.argv[1]).resolve(),
    Path(sys.argv[2]).resolve(),
    int(sys.argv[3]),
    float(sys.argv[4]),
)
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
os.environ |= {"ONESWEEP_STATE": f"{folder}/serve-up", "XDG_STATE_HOME": f"{folder}/serve"}
draw, began = random.Random(seed), time.monotonic()


def say(line: object) -> None:
    print(f"{time.monotonic() - began:7.1f} {line}", flush=True)


def start(name: str, *arguments: object) -> subprocess.Popen[bytes]:
    own = {"XDG_STATE_HOME": f"{folder}/{name}", "XDG_CACHE_HOME": f"{folder}/{name}-cache"}
    own |= {"ONESWEEP_STATE": f"{folder}/{name}-up"}
    command = [sys.executable, "-P", "-m", "serving.cli", *map(str, arguments)]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own}, start_new_session=True)


def send(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def end(process: subprocess.Popen[bytes], number: int) -> None:
    send(process, number)
    process.wait(60)


def client() -> Client:
    return Client(f"127.0.0.1:{PORT + 1}", tls=Tls(folder / "serve/onesweep/run/ca.pem"))


def text(number: int) -> bytes:
    with client() as asking:
        return asking.generate(b"the sea", mode="ar", max_tokens=TOKENS, seed=number, temperature=1.0).text


def wait_until_whole() -> float:
    begin = time.monotonic()
    while time.monotonic() - begin < WHOLE_S:
        try:
            with client() as asking:
                if asking.status().ready:
                    return time.monotonic() - begin
        except (OnesweepError, OSError):
            pass
        time.sleep(0.5)
    sys.exit(f"the ring is not whole after {WHOLE_S:.0f} s: see {folder}")


serve_line = ("serve", model, "--wait", MACHINES, "--listen", f"127.0.0.1:{PORT}", "--port", PORT + 1)
serve_line = (*serve_line, "--http", f"127.0.0.1:{PORT + 2}")
serve = start("serve", *serve_line)
while not (ticket := re.search(r"onesweep join (\S+)", (folder / "serve.log").read_text())):
    time.sleep(0.5)
machines = {
    f"m{i}": start(
        f"m{i}", "join", ticket[1], "--name", f"m{i}", "--listen", f"127.0.0.1:{PORT + 4 + i}", "--threads", 1
    )
    for i in range(MACHINES)
}
wait_until_whole()
right = [text(number) for number in range(SEEDS)]
found, wrong, is_over = Counter[str](), list[int](), threading.Event()


def ask(number: int) -> None:
    own = random.Random(seed * 100 + number)
    while not is_over.is_set():
        asked = own.randrange(SEEDS)
        try:
            is_right = text(asked) == right[asked]
        except OnesweepError as error:
            found[re.sub(r"\d+", "#", f"{error}")[:160]] += 1
            time.sleep(1)
            continue
        found["right" if is_right else "wrong"] += 1
        time.sleep(own.uniform(0.2, 1.5))


asking = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(2)]
for thread in asking:
    thread.start()
faults, waits_s = 0, list[float]()
while time.monotonic() - began < 60 * minutes:
    fault, pause_s = draw.choice(FAULTS), draw.choice(PAUSES_S)
    hit = draw.sample(sorted(machines), 2 if fault == "two" else 1)
    say(f"{fault} {'' if fault.startswith('serve') else ' '.join(hit)} for {pause_s} s")
    if fault == "freeze":
        send(machines[hit[0]], signal.SIGSTOP)
        time.sleep(pause_s)
        send(machines[hit[0]], signal.SIGCONT)
    elif fault.startswith("serve"):
        end(serve, signal.SIGKILL if fault == "serve killed" else signal.SIGTERM)
        time.sleep(min(pause_s, 20))
        serve = start("serve", *serve_line)
    else:
        for name in hit:
            end(machines[name], signal.SIGTERM if fault == "leave" else signal.SIGKILL)
        time.sleep(pause_s)
        machines |= {name: start(name, "join", "--threads", 1) for name in hit}
    time.sleep(1)
    waits_s.append(wait_until_whole())
    faults += 1
    if ended := [name for name, process in {**machines, "serve": serve}.items() if process.poll() is not None]:
        sys.exit(f"ended by themselves: {ended}; see {folder}")
    if any(text(number) != right[number] for number in (0, 1)):
        sys.exit(f"a wrong text, though the ring is whole; see {folder}")
    time.sleep(draw.uniform(1, 6))
is_over.set()
for thread in asking:
    thread.join()
for process in (*machines.values(), serve):
    end(process, signal.SIGTERM)
waits_s.sort()
say(f"{faults} faults; whole again after {waits_s[len(waits_s) // 2]:.0f} s in the median, {waits_s[-1]:.0f} s at most")
for what, count in found.most_common():
    print(f"{count:5} {what}")
sys.exit(1 if found["wrong"] else 0)
