// Conversations, kept in this browser: the gateway keeps none.

const KEY = "onesweep-chats";
const MAX_CHATS = 30;
const MAX_CHARACTERS = 2e6; // of all together; a browser keeps about five million
const TITLE_CHARACTERS = 40;

/** Conversations that are kept, the newest first. */
export function keptChats() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return kept.filter((each) => typeof each.id === "string" && Array.isArray(each.messages));
  } catch {
    return []; // of another version, or a browser that keeps nothing
  }
}

/** Keeps a conversation, and forgets the oldest ones where there are too many. */
export function keepChat(id, messages) {
  const title = (messages[0]?.content ?? "").slice(0, TITLE_CHARACTERS);
  write([{ id, title, messages }, ...keptChats().filter((each) => each.id !== id)].slice(0, MAX_CHATS));
}

export function forgetChat(id) {
  write(keptChats().filter((each) => each.id !== id));
}

function write(chats) {
  let size = 0;
  const fitting = chats.filter((each) => (size += JSON.stringify(each).length) <= MAX_CHARACTERS);
  try {
    localStorage.setItem(KEY, JSON.stringify(fitting));
  } catch {
    // the browser keeps nothing: the conversation lasts as long as the page
  }
}
