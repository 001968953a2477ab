// Markdown as chat models write it, as elements: text goes in as text, so nothing that a model writes can become markup.

import { html } from "./dom.js";

const FENCE = /^\s*```(\S*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*\d{1,9}[.)]\s+(.*)$/;
// Code before all else: nothing within it is marked.
const INLINE = /`([^`\n]+)`|\*\*(\S(?:.*?\S)?)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

/** The blocks of a text: paragraphs, headings, lists and code. */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  while (lines.length) {
    const line = lines.shift();
    if (FENCE.test(line)) blocks.push(code(lines));
    else if (HEADING.test(line)) blocks.push(html("p", {}, html("strong", {}, ...inline(line.match(HEADING)[2]))));
    else if (BULLET.test(line)) blocks.push(list("ul", BULLET, [line, ...lines], lines));
    else if (NUMBER.test(line)) blocks.push(list("ol", NUMBER, [line, ...lines], lines));
    else if (line.trim()) blocks.push(paragraph(line, lines));
  }
  return blocks;
}

/** Code up to the end of its fence, which may not have come yet. Takes its lines. */
function code(lines) {
  const end = lines.findIndex((line) => FENCE.test(line));
  const within = lines.splice(0, end < 0 ? lines.length : end + 1);
  if (end >= 0) within.pop();
  return html("pre", {}, html("code", {}, within.join("\n")));
}

/** The items that follow each other, the first of which was taken already. Takes the lines of the others. */
function list(tag, item, all, lines) {
  const count = all.findIndex((line) => !item.test(line));
  const items = count < 0 ? all : all.slice(0, count);
  lines.splice(0, items.length - 1);
  return html(tag, {}, ...items.map((line) => html("li", {}, ...inline(line.match(item)[1]))));
}

/** Lines up to one that is empty or begins another block. Takes them. */
function paragraph(first, lines) {
  const end = lines.findIndex((line) => !line.trim() || [FENCE, HEADING, BULLET, NUMBER].some((kind) => kind.test(line)));
  return html("p", {}, ...inline([first, ...lines.splice(0, end < 0 ? lines.length : end)].join("\n")));
}

function inline(text) {
  const found = text.match(INLINE);
  if (!found) return [text];
  const [whole, coded, bold, slanted, name, address] = found;
  const marked = coded
    ? html("code", {}, coded)
    : bold
      ? html("strong", {}, ...inline(bold))
      : slanted
        ? html("em", {}, ...inline(slanted))
        : html("a", { href: address, rel: "noreferrer", target: "_blank" }, name);
  return [text.slice(0, found.index), marked, ...inline(text.slice(found.index + whole.length))];
}
