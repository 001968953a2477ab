// One mode in a race: its text as it appears, its trips on a common scale of time, and its costs.

import { duration, html, size, svg } from "./dom.js";
import { qualityOf } from "./modes.js";

const SCALE = 1000;

export class Lane {
  /** `tint`: which colour; `runner`: its dot on the map; `bits`: of the judge, by mode or MODE:SCORER. */
  constructor(label, tint, prompt, runner, bits = {}) {
    this.label = label;
    this.bits = bits;
    this.runner = runner;
    this.trips = [];
    this.bytes = 0;
    this.computeMs = 0;
    this.startedAt = null;
    this.result = null;
    this.state = html("span", { classes: "state" }, "waiting");
    this.fresh = html("span", { classes: "fresh" });
    this.given = html("span", { classes: "given" }, prompt);
    this.written = html("p", { classes: "written" }, this.given, this.fresh);
    this.track = svg("svg", { class: "track", viewBox: `0 0 ${SCALE} 10`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.stripes = [svg("path"), svg("path", { class: "even" }), svg("path", { class: "open" })];
    this.track.append(...this.stripes);
    this.costs = {};
    const facts = html("dl", { classes: "costs" });
    for (const [key, title] of [["sweeps", "sweeps"], ["time", "time"], ["wire", "on the wire"], ["compute", "compute"], ["hosts", "host-seconds"]]) {
      this.costs[key] = html("dd", {}, "–");
      facts.append(html("div", {}, html("dt", {}, title), this.costs[key]));
    }
    this.reason = html("p", { classes: "reason quiet", hidden: true });
    const heading = html("h3", {}, html("span", { classes: "swatch" }), label);
    this.quality = html("span");
    this.judged = html("span");
    this.twins = html("span");
    this.showQuality(...label.split(":"));
    const badges = html("p", { classes: "badges" }, this.state, this.quality, this.judged, this.twins);
    this.element = html("li", { classes: `lane lane-${tint}` }, heading, badges, this.written, this.reason, this.track, facts);
  }

  start() {
    this.startedAt = performance.now();
    this.state.textContent = "running";
  }

  addTrip(trip) {
    this.trips.push(trip);
    this.bytes += trip.wire_bytes;
    this.computeMs += trip.hosts.reduce((sum, host) => sum + host.compute_ms, 0);
    this.runner.trip(trip);
    this.showCosts(this.trips.length, trip.end_ms, this.bytes, this.computeMs, this.computeMs / 1000);
  }

  addText(text) {
    this.fresh.append(text);
  }

  finish(result) {
    this.result = result;
    this.runner.end();
    this.showCosts(result.sweeps, result.latency_ms, result.wire_bytes_total, result.compute_ms, result.host_seconds);
    this.showQuality(result.mode, result.scorer);
    this.explain(result.reason);
  }

  /** The badges that say how good the text of a mode is. */
  showQuality(mode, scorer) {
    const bits = this.bits[`${mode}:${scorer}`] ?? this.bits[mode];
    this.judged.textContent = bits ? `${bits.toFixed(2)} judge bits` : "";
    this.judged.className = bits ? "badge" : "";
    const quality = qualityOf(mode);
    this.quality.textContent = quality?.text ?? "";
    this.quality.className = quality ? `badge ${quality.kind}` : "";
  }

  /** `others`: label, whether the text is the `same`, and whether that is `promised`, of each lane that is done. */
  showTwins(others) {
    const names = (lanes) => lanes.map(({ label }) => label).join(", ");
    const [equal, found] = [others.filter((o) => o.same && o.promised), others.filter((o) => o.same && !o.promised)];
    const broken = others.filter((o) => !o.same && o.promised);
    const notes = [];
    if (broken.length) notes.push(`differs from ${names(broken)}, which promises the same text: please report it`);
    if (equal.length) notes.push(`identical to ${names(equal)}, as promised`);
    if (found.length) notes.push(`identical to ${names(found)}`);
    this.twins.textContent = notes.join("; ");
    this.twins.className = notes.length ? `badge ${broken.length ? "broken" : "twin"}` : "";
  }

  fail(sentence, state = "failed") {
    this.failed = true;
    this.runner.end();
    this.state.textContent = state;
    this.explain(sentence);
  }

  get running() {
    return !this.result && !this.failed;
  }

  explain(sentence) {
    this.reason.textContent = sentence;
    this.reason.hidden = !sentence;
  }

  showCosts(sweeps, ms, bytes, computeMs, hostSeconds) {
    this.costs.sweeps.textContent = sweeps;
    this.costs.time.textContent = duration(ms);
    this.costs.wire.textContent = size(bytes);
    this.costs.compute.textContent = duration(computeMs);
    this.costs.hosts.textContent = hostSeconds.toFixed(hostSeconds < 1 ? 3 : 2);
  }

  /** Milliseconds since this lane's admission. */
  elapsedMs() {
    if (this.result) return this.result.latency_ms;
    if (this.failed || this.startedAt === null) return this.trips.at(-1)?.end_ms ?? 0;
    return performance.now() - this.startedAt;
  }

  /** Draws the trips on a track that is `fullMs` long: one shade after the other, and faint what is still under way. */
  drawTrack(fullMs) {
    const paths = ["", "", ""];
    const draw = (stripe, begin, end) => {
      paths[stripe] += `M${((begin / fullMs) * SCALE).toFixed(1)} 5H${((end / fullMs) * SCALE).toFixed(1)}`;
    };
    this.trips.forEach((trip, index) => draw(index % 2, trip.begin_ms, trip.end_ms));
    const last = this.trips.at(-1)?.end_ms ?? 0;
    // what follows the last trip, or all of a text that took none, is the router's own work
    draw(this.result && !this.trips.length ? 0 : 2, last, this.elapsedMs());
    this.stripes.forEach((stripe, index) => stripe.setAttribute("d", paths[index]));
  }
}
