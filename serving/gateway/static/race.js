// The race page: one prompt in several modes, trip by trip.

import { askForToken, hosts, keepToken, race, Refused } from "./api.js";
import { byId, duration, html, showProblem, showServer } from "./dom.js";
import { Lane } from "./lane.js";
import { RingMap } from "./map.js";
import { aboutMode, promisedEqual } from "./modes.js";

// Those that show the difference: few trips, few trips and the same text, a trip a token.
const USUAL = ["resample:scorer", "ar-speculative", "ar", "local:copy", "local"];
const MAX_TICKED = 3;
const TINTS = 12;
const REFRESH_MS = 2000;
const REDRAW_MS = 60;
const RANKS = ["1st", "2nd", "3rd"];
const DRAWS = "This model draws pictures, and only texts race: POST /v1/images/generations, or `onesweep draw --compare`.";

const map = new RingMap(byId("map"));
const form = byId("form");
let lanes = new Map();
let aborter = null;
let offered = "";
let judgeBits = {};

async function refresh() {
  try {
    const status = await hosts();
    // who comes without a wish sees what the model is for
    if (location.pathname === "/" && status.chat) location.replace("/chat");
    map.show(status.hosts);
    showServer(status);
    judgeBits = status.judge_bits;
    byId("human-bits").textContent = status.human_bits.toFixed(2);
    byId("judge").hidden = !status.human_bits;
    form.hidden = Boolean(status.pictures);
    offer(status.entrants);
    const unready = status.hosts.map((host) => host.reason).filter(Boolean).join("; ");
    showProblem(byId("unready"), status.ready ? (status.pictures ? DRAWS : "") : unready);
  } catch (error) {
    showProblem(byId("unready"), `${error.message} Trying again every ${REFRESH_MS / 1000} s.`);
    askForToken(error);
  }
}

/** Boxes for the modes that are served, with the usual ones ticked. */
function offer(entrants) {
  if (offered === entrants.join()) return;
  offered = entrants.join();
  const first = [...USUAL.filter((each) => entrants.includes(each)), ...entrants].slice(0, MAX_TICKED);
  const ticked = new Set(boxes().length ? chosen() : first);
  for (const former of byId("entrants").querySelectorAll(".chip, p")) former.remove();
  byId("others").hidden = !entrants.some((each) => !first.includes(each));
  // in one place below the boxes: over them it would hide the next mode, and a finger cannot hover
  byId("tips").replaceChildren(html("p", { id: "tip-hint", classes: "shown" }, "Point at a mode, or move to it with Tab, to read what it does."));
  for (const [index, entrant] of entrants.entries()) {
    const box = html("input", { type: "checkbox", name: "entrant", value: entrant, checked: ticked.has(entrant) });
    const swatch = html("span", { classes: `swatch lane-${index % TINTS}` });
    const tip = html("p", { id: `about-${index}`, role: "tooltip" }, html("b", {}, entrant), `: ${aboutMode(entrant)}`);
    box.setAttribute("aria-describedby", tip.id);
    const chip = html("label", { classes: "chip" }, box, swatch, entrant);
    if (first.includes(entrant)) byId("others").before(chip);
    else byId("others").append(chip);
    byId("tips").append(tip);
  }
}

/** Shows the tooltip of a mode, or of none: it stays until another is shown. */
function showTip(chip) {
  const shown = chip?.querySelector("input").getAttribute("aria-describedby") ?? "tip-hint";
  for (const tip of byId("tips").children) tip.classList.toggle("shown", tip.id === shown);
}

const boxes = () => [...form.querySelectorAll("[name=entrant]")];
const chosen = () => boxes().filter((box) => box.checked).map((box) => box.value);

function requested() {
  const temperature = byId("temperature").value;
  return {
    entrants: chosen(),
    seed: byId("seed").valueAsNumber,
    together: !byId("turns").checked,
    prompt: byId("prompt").value,
    max_bytes: byId("bytes").valueAsNumber,
    temperature: temperature === "" ? null : Number(temperature),
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
  // they were measured at the usual temperature
  const bits = request.temperature === null ? judgeBits : {};
  const order = offered.split(",");  // that of the boxes differs: the usual modes come first
  for (const lane of lanes.values()) if (lane.running) lane.fail("");
  lanes = new Map(
    request.entrants.map((label, place) => {
      const tint = order.indexOf(label) % TINTS;
      return [label, new Lane(label, tint, request.prompt, map.addRunner(label, tint, place), bits)];
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
    lane.finish(event.result);
    rank();
    markTwins();
    const { sweeps, latency_ms: ms } = event.result;
    say(`${event.lane} is done: ${sweeps} ${sweeps === 1 ? "sweep" : "sweeps"}, ${duration(ms)}`);
  }
}

/** Places by what each request took, which is the order of arrival where they started together. */
function rank() {
  const done = [...lanes.values()].filter((lane) => lane.result);
  done.sort((a, b) => a.result.latency_ms - b.result.latency_ms);
  for (const [place, lane] of done.entries()) lane.state.textContent = RANKS[place] ?? `${place + 1}th`;
}

/** Tells which texts are identical, and where that was promised. */
function markTwins() {
  const done = [...lanes.values()].filter((lane) => lane.result);
  for (const lane of done) {
    const others = done.filter((other) => other !== lane).map((other) => ({
      label: other.label,
      same: other.result.output_hex === lane.result.output_hex,
      promised: promisedEqual(lane.result.mode, other.result.mode),
    }));
    lane.showTwins(others);
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
for (const kind of ["pointerover", "focusin"]) {
  byId("entrants").addEventListener(kind, ({ target }) => target.closest(".chip") && showTip(target.closest(".chip")));
}
byId("entrants").addEventListener("keydown", (event) => event.key === "Escape" && showTip(null));
byId("stop").addEventListener("click", () => aborter?.abort());
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

keepToken(refresh);
refresh();
setInterval(() => document.hidden || aborter || refresh(), REFRESH_MS);
