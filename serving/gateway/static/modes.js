// What each mode does, and how good its text is.

const EXACT = { kind: "exact", text: "text of the model, exact" };
const LIKELY = { kind: "near", text: "leans to likely text" };
const SMALLER = { kind: "near", text: "text of a smaller model" };
const COPY = { kind: "near", text: "text of the model in fewer bits" };
const SOUP = { kind: "soup", text: "noise chain: letter soup at this size" };

const MODES = {
  sweep: ["One trip writes the whole text: every host takes some noise out of it.", SOUP],
  chunked: ["As sweep, a few tokens at a time: one trip per chunk.", SOUP],
  resample: ["A drafter writes the whole text many times, one trip scores them all, and one is drawn by its score.", LIKELY],
  ar: ["The usual way, one token per trip round the ring: the others are measured against it.", EXACT],
  "ar-speculative": ["The last host drafts tokens, and one trip verifies them all. The text is that of ar, byte for byte.", EXACT],
  local: ["A small model on the router writes alone: no trip at all.", SMALLER],
  "local:copy": ["The model in fewer bits, on the router, writes alone: no trip at all.", COPY],
  auto: ["Picks a mode by its text and its trips, or by what fits the latency budget, and says why."],
};
const SAME_TEXT = ["ar", "ar-speculative"];

/** A sentence or two about an entrant: a mode, or MODE:SCORER. */
export function aboutMode(entrant) {
  const [mode, scorer] = entrant in MODES ? [entrant] : entrant.split(":");
  const about = MODES[mode]?.[0] ?? "";
  return scorer ? `${about} The scorer is ${scorer}.` : about;
}

/** `kind` and a few words; nothing for a mode that another one runs for. */
export const qualityOf = (mode) => MODES[mode]?.[1];

/** Whether two modes are to write the same text for the same seed. */
export const promisedEqual = (one, other) => SAME_TEXT.includes(one) && SAME_TEXT.includes(other);
