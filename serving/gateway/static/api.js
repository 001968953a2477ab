// The gateway, from a page.

/** A refusal; its message is a sentence for people. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const TOKEN = "onesweep-token";

/** Remembers what is typed as the access token for as long as the tab is open, on both pages. */
export function keepToken(changed) {
  const field = document.getElementById("token");
  field.value = sessionStorage.getItem(TOKEN) ?? "";
  field.addEventListener("change", () => {
    sessionStorage.setItem(TOKEN, field.value.trim());
    changed();
  });
}

/** Opens the field for the token where the router wants one. */
export function askForToken({ status }) {
  if (status === 401) document.getElementById("token").closest("details").open = true;
}

function headers() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The gateway does not answer. Check that `onesweep http` runs.", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(body?.error?.message ?? `The gateway answered ${response.status}.`, response.status);
}

/** The router's hosts, modes and links. Throws Refused. */
export async function hosts() {
  return (await ask("/api/hosts", {})).json();
}

/** What happens in a race, one event at a time. Throws Refused. */
export const race = (request, signal) => events("/api/race", request, signal);

/** The chunks of an answer, as in OpenAI's API. Throws Refused. */
export const chat = (request, signal) => events("/v1/chat/completions", { ...request, stream: true }, signal);

async function* events(path, request, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("The gateway ended the answer early. See its log.", 0);
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) continue; // a comment: the hosts still read the prompt
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error?.message) throw new Refused(chunk.error.message, 0);
      yield chunk;
    }
  }
}
