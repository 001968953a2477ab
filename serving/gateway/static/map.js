// The ring of hosts, and dots that go round it.

import { svg } from "./dom.js";

const RADIUS = 17;
const MARGIN = { x: 62, y: 46 };
const FASTEST_LAP_MS = 450; // so that an eye can follow it
const FIRST_LAP_MS = 900;
const ALMOST = 0.94; // a round ends when the router hears of it, not before

export class RingMap {
  constructor(container) {
    this.container = container;
    this.hosts = [];
    this.runners = new Set();
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.draw()).observe(container);
  }

  /** Shows hosts as the router's status has them. */
  show(hosts) {
    const drawn = JSON.stringify(hosts.map((h) => [h.name, h.blocks, h.ready, h.rtt_ms.toFixed(1), h.links]));
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.hosts = hosts;
    this.draw();
  }

  /** A dot for a lane; `place` tells it from the others on the same link. */
  addRunner(label, tint, place) {
    const runner = new Runner(this, label, tint, place);
    this.runners.add(runner);
    this.dots?.append(runner.dot);
    if (this.runners.size === 1) requestAnimationFrame((now) => this.frame(now));
    return runner;
  }

  frame(now) {
    for (const runner of this.runners) runner.move(now);
    if (this.runners.size) requestAnimationFrame((next) => this.frame(next));
  }

  /** Hosts by stage: those that hold the same blocks stand for each other. */
  stages() {
    const stages = new Map();
    for (const host of [...this.hosts].sort((a, b) => (a.blocks[0] ?? 0) - (b.blocks[0] ?? 0))) {
      const blocks = host.blocks.join(",");
      stages.set(blocks, [...(stages.get(blocks) ?? []), host]);
    }
    return [...stages.values()];
  }

  draw() {
    const width = this.container.clientWidth;
    const height = Math.max(272, Math.min(400, this.container.clientHeight));
    if (!width || !this.hosts.length) return;
    const order = [null, ...this.stages().flat()];
    this.centre = { x: width / 2, y: height / 2 };
    this.places = new Map(
      order.map((host, index) => {
        const angle = -Math.PI / 2 + (2 * Math.PI * index) / order.length;
        const x = this.centre.x + Math.cos(angle) * Math.min(width / 2 - MARGIN.x, 260);
        return [host?.name ?? null, { x, y: this.centre.y + Math.sin(angle) * (height / 2 - MARGIN.y) }];
      }),
    );
    const image = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.described() });
    const labels = svg("g");
    for (const edge of this.edges()) this.drawEdge(image, labels, edge);
    image.append(labels);
    for (const host of order) image.append(this.node(host));
    this.dots = svg("g", { "aria-hidden": "true" });
    for (const runner of this.runners) this.dots.append(runner.dot);
    image.append(this.dots);
    this.container.replaceChildren(image);
  }

  /** Hosts that may follow in a sweep once it has passed `block`: those that begin with the next one. */
  after(block) {
    return this.hosts.filter((host) => host.blocks[0] === block + 1);
  }

  /** From the router through the hosts and back; dashed: from the last hosts to the first, the way of `ar`. */
  edges() {
    const first = this.after(-1);
    const end = Math.max(...this.hosts.flatMap((host) => host.blocks));
    const last = this.hosts.filter((host) => host.blocks.at(-1) === end);
    const edges = first.map((host) => ({ from: null, to: host.name, ms: host.rtt_ms, broken: !host.ready }));
    for (const host of this.hosts) edges.push(...this.between([host], this.after(host.blocks.at(-1))));
    const stages = this.stages().length;
    if (stages > 1) edges.push(...last.map((host) => ({ from: host.name, to: null, ms: host.rtt_ms, broken: !host.ready })));
    if (stages > 2) edges.push(...this.between(last, first).map((edge) => ({ ...edge, loop: true })));
    return edges;
  }

  between(stage, next) {
    return stage.flatMap((host) =>
      next.map((after) => {
        const link = host.links.find(({ to }) => to === after.name);
        const broken = !host.ready || !after.ready || Boolean(link?.problem);
        return { from: host.name, to: after.name, ms: link?.rtt_ms, broken };
      }),
    );
  }

  drawEdge(image, labels, { from, to, ms, broken, loop }) {
    const [a, b] = [this.places.get(from), this.places.get(to)];
    const classes = `edge${broken ? " broken" : ""}${loop ? " loop" : ""}`;
    image.append(svg("line", { class: classes, x1: a.x, y1: a.y, x2: b.x, y2: b.y }));
    if (!ms || broken) return;
    // between stages of several hosts links cross in the middle
    const t = this.places.size > this.stages().length + 1 ? 0.36 : 0.5;
    const at = { x: a.x + t * (b.x - a.x), y: a.y + t * (b.y - a.y) + 4 };
    labels.append(svg("text", { class: "ms", ...at }, `${round(ms)} ms`));
  }

  node(host) {
    const { x, y } = this.places.get(host?.name ?? null);
    const classes = host ? (host.ready ? "node" : "node broken") : "node router";
    const group = svg("g", { class: classes });
    group.append(svg("circle", { cx: x, cy: y, r: RADIUS }));
    // names stand outside the ring, where no link crosses them
    const above = y < this.centre.y + 1;
    const name = svg("text", { x, y: above ? y - RADIUS - 8 : y + RADIUS + 17 }, host?.name ?? "router");
    group.append(name);
    if (host) group.append(svg("text", { class: "blocks", x, y: y + 4 }, host.blocks.join(",")));
    return group;
  }

  described() {
    const stages = this.stages().map((stage) => stage.map((h) => `${h.name} (block ${h.blocks.join(", ")})`).join(" or "));
    return `Router, then ${stages.join(", then ")}, then the router again.`;
  }

  /** The way of a sweep whose hosts are not known yet. */
  usualWay() {
    const way = [null];
    for (let [host] = this.after(-1); host; [host] = this.after(host.blocks.at(-1))) way.push(host.name);
    return [...way, null];
  }

  /** A point on a way, a share of it done, beside the middle by `offset` pixels. */
  pointOn(way, share, offset) {
    const along = share * (way.length - 1);
    const leg = Math.min(way.length - 2, Math.floor(along));
    const [a, b] = [this.places.get(way[leg]), this.places.get(way[leg + 1])];
    if (!a || !b) return this.centre;
    const t = along - leg;
    const length = Math.hypot(b.x - a.x, b.y - a.y) || 1;
    return {
      x: a.x + (b.x - a.x) * t + (offset * (a.y - b.y)) / length,
      y: a.y + (b.y - a.y) * t + (offset * (b.x - a.x)) / length,
    };
  }
}

/** One lane's dot. Between two trips its place is a guess: the last trip's pace. */
class Runner {
  constructor(map, label, tint, place) {
    this.map = map;
    this.offset = (place - 2) * 4.5;
    // `ar` hands its bytes from the last host to the first; every other mode comes back to the router
    this.loops = label === "ar";
    this.stays = label.startsWith("local");
    this.dot = svg("circle", { class: `dot lane-${tint}`, r: 6.5 });
    this.trips = 0;
    this.position = 0;
    this.lapMs = FIRST_LAP_MS;
    this.way = null;
  }

  trip({ begin_ms: begin, end_ms: end, hosts }) {
    this.trips += 1;
    this.lapMs = Math.max(FASTEST_LAP_MS, end - begin);
    const names = hosts.map((host) => host.name);
    if (!names.length) return;
    const start = this.loops && this.trips > 1 ? names.at(-1) : null;
    this.way = this.loops ? [start, ...names] : [null, ...names, null];
  }

  move(now) {
    const passed = Math.min(100, now - (this.before ?? now)) / this.lapMs;
    this.before = now;
    if (!this.map.places) return;
    // whole rounds that an eye could not follow are left out: the dot is at the same place after them
    if (this.trips - this.position > 1) this.position += Math.floor(this.trips - this.position);
    const most = this.position < this.trips ? this.trips : this.trips + ALMOST;
    this.position = Math.min(most, this.position + (this.position < this.trips ? 2 : 1) * passed);
    const share = this.stays ? 0 : this.position - Math.floor(this.position);
    const { x, y } = this.map.pointOn(this.way ?? this.map.usualWay(), share, this.offset);
    this.dot.setAttribute("cx", x);
    this.dot.setAttribute("cy", y);
  }

  end() {
    this.dot.remove();
    this.map.runners.delete(this);
  }
}

const round = (ms) => (ms < 10 ? ms.toFixed(1) : Math.round(ms));
