// The chat page: conversations with the served model, in its own chat template.

import { askForToken, chat, hosts, keepToken, Refused } from "./api.js";
import { forgetChat, keepChat, keptChats } from "./chats.js";
import { byId, duration, html, showProblem, showServer } from "./dom.js";
import { markdown } from "./markdown.js";

const UNFIT = "The served model has no chat template, so it cannot chat: it continues texts, on the Race page.";
const NEAR_END_PX = 120;
const REFRESH_MS = 2000;
const COPIED_MS = 1500;

const form = byId("form");
let id = crypto.randomUUID?.() ?? `${Date.now()}`;
let messages = [];
let aborter = null;

async function refresh() {
  try {
    const status = await hosts();
    showServer(status);
    byId("chat-link").hidden = false;
    byId("model").textContent = status.model || "the served model";
    byId("sampling").textContent = status.sampling ? `Default where a field is empty: ${status.sampling}.` : "";
    form.hidden = !status.chat && !messages.length;
    const reasons = status.hosts.map((host) => host.reason).filter(Boolean).join("; ");
    showProblem(byId("unready"), status.chat && status.ready ? "" : reasons ? trying(reasons) : status.chat ? "" : UNFIT);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    showProblem(byId("unready"), trying(error.message));
    askForToken(error);
  }
}

const trying = (sentence) => `${sentence.replace(/\.$/, "")}. Trying again every ${REFRESH_MS / 1000} s.`;

async function send() {
  const field = byId("message");
  const content = field.value.trim();
  if (aborter || !content) return;
  field.value = "";
  const asked = { role: "user", content };
  const question = addTurn(asked);
  // nothing came: the message goes back, to be sent again
  if (!(await answer(messages, asked))) {
    question.remove();
    field.value ||= content;
  }
}

/** Asks for the last answer once more. */
async function regenerate() {
  if (aborter || messages.length < 2) return;
  const [asked, former] = messages.splice(-2);
  const shown = byId("turns").lastElementChild;
  shown.remove();
  if (!(await answer(messages, asked))) {
    messages.push(asked, former);
    byId("turns").append(shown);
  }
  showLast();
}

/** Streams an answer into the page, and keeps it. False where nothing came. */
async function answer(conversation, asked) {
  aborter = new AbortController();
  showProblem(byId("problem"), "");
  showRunning(true);
  showLast(); // the buttons of the answer before go
  const turn = addTurn({ role: "assistant", content: "" });
  const text = turn.querySelector(".text");
  let [answered, costs] = ["", null];
  try {
    for await (const chunk of chat(requested([...conversation, asked]), aborter.signal)) {
      const piece = chunk.choices[0]?.delta.content ?? "";
      answered += piece;
      costs = chunk.onesweep?.accounting[0] ?? costs;
      if (piece) text.replaceChildren(...markdown(answered));
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
    byId("message").focus();
  }
  if (!answered && !costs) {
    turn.remove();
    return false;
  }
  const written = { role: "assistant", content: answered, costs: costs ? costsLine(costs) : "stopped" };
  conversation.push(asked, written);
  if (conversation === messages) {
    turn.replaceWith(turnOf(written));
    keepChat(id, messages);
    showChats();
  }
  byId("said").textContent = answered;
  showLast();
  follow();
  return true;
}

function requested(conversation) {
  const number = (field) => (byId(field).value === "" ? null : byId(field).valueAsNumber);
  return {
    model: "onesweep",
    messages: conversation.map(({ role, content }) => ({ role, content })),
    max_tokens: byId("tokens").valueAsNumber,
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed"),
  };
}

function addTurn(message) {
  const turn = turnOf(message);
  byId("turns").append(turn);
  follow();
  return turn;
}

/** A message of a conversation as the page shows it. */
function turnOf({ role, content, costs = "" }) {
  const isAnswer = role === "assistant";
  const text = html("div", { classes: "text" }, ...(isAnswer ? markdown(content) : [html("p", {}, content)]));
  const turn = html("li", { classes: `turn ${role}` }, html("h3", {}, isAnswer ? "Model" : "You"), text);
  if (!isAnswer) return turn;
  const copy = html("button", { classes: "small plain", type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(content);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), COPIED_MS);
  });
  copy.hidden = !navigator.clipboard; // a browser gives it to a page of this machine, or over https
  const again = html("button", { classes: "small plain again", type: "button" }, "Regenerate");
  again.addEventListener("click", regenerate);
  turn.append(html("p", { classes: "quiet" }, html("span", { classes: "costs-line" }, costs), copy, again));
  return turn;
}

/** Only the last answer can be asked for again. */
function showLast() {
  const all = [...document.querySelectorAll(".again")];
  for (const each of all) each.hidden = Boolean(aborter) || each !== all.at(-1);
}

/** The list of conversations, this one chosen where it is kept. */
function showChats() {
  const kept = keptChats();
  const isKept = kept.some((each) => each.id === id);
  const options = kept.map((each) => html("option", { value: each.id, selected: each.id === id }, each.title));
  if (!isKept) options.unshift(html("option", { value: id, selected: true }, "New chat"));
  byId("chats").replaceChildren(...options);
  byId("chats-label").hidden = !kept.length;
  byId("forget").hidden = !isKept;
}

function open(chosen, kept = []) {
  aborter?.abort();
  [id, messages] = [chosen, kept];
  byId("turns").replaceChildren(...kept.map(turnOf));
  showProblem(byId("problem"), "");
  showChats();
  showLast();
}

function costsLine({ mode, output_tokens: tokens, sweeps, latency_ms: ms, sampling }) {
  const drawn = sampling ? `, ${sampling}` : "";
  return `${tokens} tokens by ${mode} in ${sweeps} ${sweeps === 1 ? "round trip" : "round trips"}, ${duration(ms)}${drawn}`;
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

const startChat = () => open(crypto.randomUUID?.() ?? `${Date.now()}`);

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
  startChat();
  byId("message").focus();
});
byId("forget").addEventListener("click", () => {
  forgetChat(id);
  startChat();
});
byId("chats").addEventListener("change", ({ target }) => {
  open(target.value, keptChats().find((each) => each.id === target.value)?.messages);
});

keepToken(refresh);
showChats();
refresh();
setInterval(() => document.hidden || aborter || refresh(), REFRESH_MS);
