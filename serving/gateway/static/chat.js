// The chat page: a conversation with the served model, in its own chat template.

import { askForToken, chat, hosts, keepToken, Refused } from "./api.js";
import { byId, duration, html, showProblem, showServer } from "./dom.js";

const UNFIT = "The served model has no chat template, so it knows no turns: it continues texts, on the page Race.";
const NEAR_END_PX = 120;
const REFRESH_MS = 2000;

const form = byId("form");
let messages = [];
let aborter = null;

async function refresh() {
  try {
    const status = await hosts();
    showServer(status);
    byId("chat-link").hidden = false;
    form.hidden = !status.chat;
    const reasons = status.hosts.map((host) => host.reason).filter(Boolean).join("; ");
    showProblem(byId("unready"), status.chat ? "" : reasons || UNFIT);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    showProblem(byId("unready"), error.message);
    askForToken(error);
  }
}

async function send() {
  const field = byId("message");
  const asked = { role: "user", content: field.value.trim() };
  if (aborter || !asked.content) return;
  aborter = new AbortController();
  const conversation = messages; // “New chat” begins another one meanwhile
  showProblem(byId("problem"), "");
  showRunning(true);
  const question = addTurn("user", "You", asked.content);
  const answer = addTurn("assistant", "Model", "");
  field.value = "";
  let [said, costs] = ["", null];
  try {
    for await (const chunk of chat(requested([...conversation, asked]), aborter.signal)) {
      const piece = chunk.choices[0]?.delta.content ?? "";
      said += piece;
      answer.text.append(piece);
      costs = chunk.onesweep?.accounting[0] ?? costs;
      if (piece) follow();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      if (!(error instanceof Refused)) throw error;
      showProblem(byId("problem"), error.message);
    }
  } finally {
    aborter = null;
    showRunning(false);
    field.focus();
  }
  if (said || costs) {
    conversation.push(asked, { role: "assistant", content: said });
    answer.costs.textContent = costs ? toldCosts(costs) : "stopped";
    byId("said").textContent = said;
  } else {
    // nothing came: the message goes back, to be sent again
    question.element.remove();
    answer.element.remove();
    field.value ||= asked.content;
  }
  follow();
}

function requested(conversation) {
  const temperature = byId("temperature").value;
  return {
    model: "onesweep",
    messages: conversation,
    max_tokens: byId("tokens").valueAsNumber,
    temperature: temperature === "" ? null : Number(temperature),
  };
}

function addTurn(role, name, content) {
  const text = html("p", {}, content);
  const costs = html("p", { classes: "quiet" });
  const element = html("li", { classes: `turn ${role}` }, html("h3", {}, name), text);
  if (role === "assistant") element.append(costs);
  byId("turns").append(element);
  follow();
  return { element, text, costs };
}

function toldCosts({ mode, output_tokens: tokens, sweeps, latency_ms: ms }) {
  return `${tokens} tokens by ${mode} in ${sweeps} ${sweeps === 1 ? "sweep" : "sweeps"}, ${duration(ms)}`;
}

/** Scrolls on with the answer, for those who read its end. */
function follow() {
  const { scrollHeight } = document.documentElement;
  if (scrollHeight - innerHeight - scrollY < NEAR_END_PX) scrollTo(0, scrollHeight);
}

function showRunning(running) {
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  if (running) byId("stop").focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
byId("stop").addEventListener("click", () => aborter?.abort());
byId("clear").addEventListener("click", () => {
  aborter?.abort();
  messages = [];
  byId("turns").replaceChildren();
  byId("message").focus();
});

keepToken(refresh);
refresh();
setInterval(() => document.hidden || !form.hidden || refresh(), REFRESH_MS);
