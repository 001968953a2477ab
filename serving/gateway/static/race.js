// The race page: one prompt, several modes, trip by trip.

import { askForToken, hosts, keepToken, race, Refused } from "./api.js";
import { byId, duration, html, showProblem } from "./dom.js";
import { Lane } from "./lane.js";
import { RingMap } from "./map.js";

const USUAL = ["sweep", "resample:chain", "ar-speculative", "ar", "local"];
const TINTS = 12;
const REFRESH_MS = 2000;
const REDRAW_MS = 60;
const RANKS = ["1st", "2nd", "3rd"];

const map = new RingMap(byId("map"));
const form = byId("form");
let lanes = new Map();
let aborter = null;
let offered = "";

async function refresh() {
  try {
    const status = await hosts();
    map.show(status.hosts);
    offer(status.entrants);
    showProblem(byId("unready"), status.ready ? "" : status.hosts.map((host) => host.reason).filter(Boolean).join("; "));
  } catch (error) {
    showProblem(byId("unready"), error.message);
    askForToken(error);
  }
}

/** Boxes for the modes that are served, with the usual ones ticked. */
function offer(entrants) {
  if (offered === entrants.join()) return;
  offered = entrants.join();
  const ticked = new Set(boxes().length ? chosen() : USUAL);
  for (const chip of byId("entrants").querySelectorAll(".chip, p")) chip.remove();
  for (const [index, entrant] of entrants.entries()) {
    const box = html("input", { type: "checkbox", name: "entrant", value: entrant, checked: ticked.has(entrant) });
    const swatch = html("span", { classes: `swatch lane-${index % TINTS}` });
    byId("entrants").append(html("label", { classes: "chip" }, box, swatch, entrant));
  }
  showSuffix();
}

const boxes = () => [...form.querySelectorAll("[name=entrant]")];
const chosen = () => boxes().filter((box) => box.checked).map((box) => box.value);

function showSuffix() {
  const wanted = chosen().some((entrant) => entrant.startsWith("infill"));
  form.querySelector(".suffix").hidden = !wanted;
}

function requested() {
  const temperature = byId("temperature").value;
  return {
    prompt: byId("prompt").value,
    suffix: form.querySelector(".suffix").hidden ? "" : byId("suffix").value,
    entrants: chosen(),
    max_bytes: byId("bytes").valueAsNumber,
    seed: byId("seed").valueAsNumber,
    temperature: temperature === "" ? null : Number(temperature),
    together: !byId("turns").checked,
  };
}

async function run() {
  if (aborter) return;
  const request = requested();
  if (!request.entrants.length) {
    showProblem(byId("problem"), "Tick at least one mode.");
    return;
  }
  aborter = new AbortController();
  prepare(request);
  const redraw = setInterval(drawTracks, REDRAW_MS);
  try {
    for await (const event of race(request, aborter.signal)) tell(event);
    showNote(request);
  } catch (error) {
    giveUp(error);
  } finally {
    clearInterval(redraw);
    drawTracks();
    aborter = null;
    showRunning(false);
  }
}

function prepare(request) {
  showProblem(byId("problem"), "");
  showRunning(true);
  byId("note").hidden = byId("lanes-wait").hidden = true;
  const order = boxes().map((box) => box.value);
  for (const lane of lanes.values()) if (lane.running) lane.fail("");
  lanes = new Map(
    request.entrants.map((label, place) => {
      const tint = order.indexOf(label) % TINTS;
      return [label, new Lane(label, tint, request.prompt, request.suffix, map.addRunner(label, tint, place))];
    }),
  );
  byId("lanes").replaceChildren(...[...lanes.values()].map((lane) => lane.element));
}

function showRunning(running) {
  const [go, stop] = [byId("go"), byId("stop")];
  const focused = [go, stop].includes(document.activeElement);
  go.hidden = running;
  stop.hidden = !running;
  if (focused) (running ? stop : go).focus();
}

function tell(event) {
  const lane = lanes.get(event.lane);
  if (event.started) lane.start();
  if (event.trip) lane.addTrip(event.trip);
  if (event.text) lane.addText(event.text);
  if (event.error) {
    lane.fail(event.error);
    say(`${event.lane} failed: ${event.error}`);
  }
  if (event.result) {
    const place = [...lanes.values()].filter((each) => each.result).length;
    lane.finish(event.result, byId("turns").checked ? "done" : (RANKS[place] ?? `${place + 1}th`));
    const { sweeps, latency_ms: ms } = event.result;
    say(`${event.lane} is done: ${sweeps} ${sweeps === 1 ? "sweep" : "sweeps"}, ${duration(ms)}`);
  }
}

function giveUp(error) {
  const stopped = error.name === "AbortError";
  if (!stopped && !(error instanceof Refused)) throw error;
  for (const lane of lanes.values()) if (lane.running) lane.fail("", stopped ? "stopped" : "failed");
  if (!stopped) showProblem(byId("problem"), error.message);
}

function drawTracks() {
  const fullMs = Math.max(1, ...[...lanes.values()].map((lane) => lane.elapsedMs()));
  for (const lane of lanes.values()) lane.drawTrack(fullMs);
}

function showNote(request) {
  byId("note").textContent = request.together
    ? "They ran at the same time on the same hosts, and slowed each other down: tick “One after another” for undisturbed times."
    : "Each ran alone. The bars have one scale: a bar is a request, a stripe in it a sweep.";
  byId("note").hidden = false;
}

const say = (sentence) => {
  byId("said").textContent = sentence;
};

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
form.addEventListener("change", showSuffix);
byId("stop").addEventListener("click", () => aborter?.abort());
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

keepToken(refresh);
refresh();
setInterval(() => document.hidden || aborter || refresh(), REFRESH_MS);
