// Elements without markup: text goes in as text, so nothing that a model writes can become part of the page.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with classes, attributes or properties, and children that are nodes or texts. */
export function html(tag, { classes = "", ...properties } = {}, ...children) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Shows what every page tells of the server: its version, and the chat where the model can. */
export function showServer(status) {
  byId("version").textContent = status.version;
  byId("chat-link").hidden = !status.chat;
}

/** Shows a sentence where there is one, and hides its place where there is none. */
export function showProblem(element, sentence) {
  if (element.textContent !== sentence) element.textContent = sentence;
  element.hidden = !sentence;
}

/** Milliseconds, or seconds from one on. */
export const duration = (ms) =>
  ms < 1000 ? `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;

export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} KB` : `${(bytes / 1e6).toFixed(1)} MB`;
}
