// The conversation: what was said, the answer while it comes, and how fast it came.

import { events, postJson } from "./api.js";
import { byId, element, seconds, short, whole } from "./format.js";
import { samplingSettings, systemPrompt } from "./settings.js";
import { hideInspector, tokenElement, TokenTexts, walkTokens } from "./tokens.js";

const CANDIDATES = 5;

/** Wires the form; `model` gives the name of the model to ask. */
export function startChat(model) {
  const said = []; // {role, content} of the conversation so far
  let answering = null; // an AbortController while an answer comes

  const setBusy = (controller) => {
    answering = controller;
    byId("stop").hidden = controller === null;
    byId("send").disabled = controller !== null;
    byId("messages").setAttribute("aria-busy", String(controller !== null));
  };

  async function send() {
    const text = byId("prompt").value.trim();
    const sampling = samplingSettings();
    if (!text || answering || sampling === null) return;
    byId("prompt").value = "";
    said.push({ role: "user", content: text });
    add(element("li", "message user")).append(element("div", "body", text));
    const answer = new Answer(add(element("li", "message assistant busy")));
    const controller = new AbortController();
    setBusy(controller);
    try {
      await receive(answer, controller.signal, sampling);
    } catch (error) {
      answer.fail(error.name === "AbortError" ? "stopped" : error.message);
    } finally {
      setBusy(null);
      answer.end();
      // What was said in part is part of the conversation; what was not answered is not.
      if (answer.content) said.push({ role: "assistant", content: answer.content });
      else said.pop();
    }
  }

  async function receive(answer, signal, sampling) {
    const system = systemPrompt();
    const messages = system ? [{ role: "system", content: system }, ...said] : said;
    const body = {
      model: model(), messages, stream: true, stream_options: { include_usage: true }, ...sampling,
    };
    if (byId("shades").checked) Object.assign(body, { logprobs: true, top_logprobs: CANDIDATES });
    const response = await postJson("v1/chat/completions", body, signal);
    for await (const event of events(response)) answer.take(event);
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const stop = () => answering?.abort();
  byId("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  byId("new-chat").addEventListener("click", () => {
    stop();
    said.length = 0;
    byId("messages").replaceChildren();
    hideInspector();
    byId("prompt").focus();
  });
  byId("messages").addEventListener("keydown", (event) => {
    // From the list of messages, the right arrow enters the newest shaded answer.
    if (event.key !== "ArrowRight" || event.target !== byId("messages")) return;
    event.preventDefault();
    [...document.querySelectorAll(".message .body:has(.token)")].at(-1)?.firstChild.focus();
  });
}

function add(item) {
  byId("messages").append(item);
  follow();
  return item;
}

function follow() {
  const list = byId("messages");
  list.scrollTop = list.scrollHeight;
}

/** One answer and its element. */
class Answer {
  #item;
  #body = element("div", "body");
  #facts = element("div", "facts");
  #texts = new TokenTexts();
  #began = performance.now();
  #first = null;
  #last = null;
  #usage = null;
  #reason = "";

  constructor(item) {
    this.#item = item;
    this.content = "";
    item.append(this.#body, this.#facts);
    walkTokens(this.#body);
  }

  /** Shows what an event of the stream adds. */
  take(event) {
    this.#usage = event.usage ?? this.#usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning_content: thought } = choice.delta;
    const tokens = choice.logprobs?.content ?? [];
    if (content || thought || tokens.length) {
      this.#last = performance.now();
      this.#first ??= this.#last;
    }
    this.#reason = choice.finish_reason ?? this.#reason;
    if (thought) this.#think(thought);
    this.content += content ?? "";
    // With shades the tokens are the text; without, they are not sent.
    if (tokens.length) this.#body.append(...tokens.map((t) => tokenElement(t, this.#texts.next(t))));
    else if (content) this.#body.append(content);
    follow();
  }

  #think(text) {
    let thoughts = this.#item.querySelector(".reasoning");
    if (!thoughts) {
      thoughts = element("div", "reasoning");
      this.#item.prepend(thoughts);
    }
    thoughts.append(text);
  }

  fail(message) {
    this.#facts.append(element("span", message === "stopped" ? "" : "error", message));
  }

  end() {
    this.#item.classList.remove("busy");
    if (!this.#usage || this.#first === null) return;
    const { prompt_tokens: prompt, completion_tokens: count } = this.#usage;
    const cached = this.#usage.prompt_tokens_details?.cached_tokens ?? 0;
    const facts = [
      `${whole(count)} tokens`, `first after ${seconds((this.#first - this.#began) / 1000)}`,
    ];
    const duration = (this.#last - this.#first) / 1000;
    if (count > 1 && duration > 0) facts.push(`${short((count - 1) / duration)} tokens/s`);
    facts.push(`${whole(cached)} of ${whole(prompt)} prompt tokens cached`);
    if (this.#reason === "length") facts.push("cut at the limit");
    this.#facts.append(facts.join(" · "));
    follow();
  }
}
