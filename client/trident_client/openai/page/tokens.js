// Tokens with their probabilities: shaded in the text, and one of them looked at closely.

import { byId, element, percent } from "./format.js";

/** Makes the text of tokens out of their bytes: a character may be spread over several. */
export class TokenTexts {
  #decoder = new TextDecoder();

  next(token) {
    if (!token.bytes) return token.token;
    return this.#decoder.decode(new Uint8Array(token.bytes), { stream: true });
  }
}

/** One token of an answer as an element. */
export function tokenElement(token, text) {
  const made = element("span", "token", text || "·");
  const probability = Math.exp(token.logprob);
  made.style.setProperty("--doubt", (1 - probability).toFixed(3));
  made.classList.toggle("special", /^<\|.*\|>$/.test(token.token) || !text);
  made.tabIndex = -1;
  made.setAttribute("role", "button");
  made.setAttribute("aria-label", `${visible(token.token)}, ${percent(probability)}`);
  made.addEventListener("click", () => inspect(made, token));
  made.addEventListener("focus", () => inspect(made, token));
  return made;
}

/** Arrow keys go from token to token of `body`; Tab reaches and leaves them as one. */
export function walkTokens(body) {
  body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const from = event.target.closest(".token");
    if (!step || !from) return;
    event.preventDefault();
    const all = [...body.querySelectorAll(".token")];
    (all[all.indexOf(from) + step] ?? from).focus();
  });
}

export function hideInspector() {
  byId("inspector").hidden = true;
}

function inspect(chosen, token) {
  document.querySelector(".token.chosen")?.classList.remove("chosen");
  chosen.classList.add("chosen");
  const list = element("ol");
  const others = token.top_logprobs.filter((other) => other.token !== token.token);
  for (const candidate of [token, ...others]) {
    list.append(candidateElement(candidate, candidate === token));
  }
  byId("inspector").replaceChildren(element("h3", "", "Chosen here, and what else was likely"), list);
  byId("inspector").hidden = false;
}

function candidateElement(candidate, isTaken) {
  const share = Math.exp(candidate.logprob);
  const item = element("li", isTaken ? "taken" : "");
  const bar = element("span", "bar-of");
  bar.style.setProperty("--share", share.toFixed(4));
  item.append(
    element("code", "", visible(candidate.token)), element("span", "share", percent(share)), bar);
  return item;
}

/** A token's text with its blanks to be seen. */
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
