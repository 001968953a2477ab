// The hosts page: what the router knows of its hosts, refreshed.

import { askForToken, hosts, keepToken } from "./api.js";
import { byId, duration, html, showProblem, showServer, size } from "./dom.js";
import { RingMap } from "./map.js";

const REFRESH_MS = 2000;

const map = new RingMap(byId("map"));
let before = "";

async function refresh() {
  try {
    show(await hosts());
    showProblem(byId("unready"), "");
  } catch (error) {
    showProblem(byId("unready"), `${error.message} Trying again every ${REFRESH_MS / 1000} s.`);
    askForToken(error);
  }
}

function show(status) {
  map.show(status.hosts);
  showServer(status);
  byId("router").replaceChildren(
    fact("state", status.ready ? "ready" : "not ready"),
    fact("requests", `${status.requests} of ${status.request_limit}`),
    fact("context", `${status.context_tokens} tokens`),
    ...(status.model ? [fact("model", status.model)] : []),
    ...(status.sampling ? [fact("sampling", status.sampling)] : []),
    fact("modes", status.modes.join(", ") || "none"),
  );
  byId("hosts").replaceChildren(...status.hosts.map(card));
  byId("advice").replaceChildren(...status.advice.map((line) => html("li", {}, line)));
  const states = status.hosts.map((host) => `${host.name} is ${host.ready ? "ready" : `not ready: ${host.reason}`}`).join("; ");
  // the first state is on the page to be read; only a change is worth interrupting for
  if (before && states !== before) byId("said").textContent = states;
  before = states;
}

const fact = (title, value) => html("div", {}, html("dt", {}, title), html("dd", {}, value));

function card(host) {
  const state = host.ready
    ? html("span", { classes: "ready" }, "ready")
    : html("span", { classes: "not-ready" }, "not ready");
  const facts = html(
    "dl",
    { classes: "facts" },
    fact("address", host.address),
    fact("blocks", host.blocks.join(", ")),
    fact("round trip", host.rtt_ms ? duration(host.rtt_ms) : "–"),
    fact("sessions", `${host.sessions}`),
    fact("their memory", size(host.session_bytes)),
  );
  if (host.queue_limit) facts.append(fact("queue", `${host.queued} of ${host.queue_limit}`));
  if (host.backend) facts.append(fact("backend", host.backend));
  for (const link of host.links) {
    const delay = link.rtt_ms ? duration(link.rtt_ms) : "–";
    facts.append(fact(`to ${link.to}`, link.problem || [link.kind, delay].filter(Boolean).join(", ")));
  }
  const reason = host.reason ? [html("p", { classes: "reason" }, host.reason)] : [];
  return html("li", { classes: "host" }, html("h3", {}, host.name, state), ...reason, facts);
}

keepToken(refresh);
refresh();
setInterval(() => byId("refresh").checked && !document.hidden && refresh(), REFRESH_MS);
