// The sampling settings: what is left empty is the server's to choose.

import { byId } from "./format.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens",
];

/** The request's fields; null if something in the form is out of range. */
export function samplingSettings() {
  const form = byId("settings");
  if (!form.checkValidity()) {
    byId("settings-box").open = true;
    form.reportValidity();
    return null;
  }
  const given = {};
  for (const name of NUMBERS) {
    const { value } = form.elements[name];
    if (value !== "") given[name] = Number(value);
  }
  if (form.elements.stop.value) given.stop = form.elements.stop.value;
  return given;
}

export const systemPrompt = () => byId("settings").elements.system.value;

/** Shows beside the heading what differs from the server's choice, so that it is seen when folded. */
export function summarizeSettings() {
  const form = byId("settings");
  const show = () => {
    const given = [...form.elements].filter((field) => field.value);
    const shown = given.map((field) =>
      field.name === "system" || field.name === "stop" ? field.name : `${field.name} ${field.value}`);
    byId("settings-summary").textContent = shown.join(" · ");
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}
