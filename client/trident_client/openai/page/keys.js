// Asking for the API key, where the gateway wants one.

import { getJson, hasKey, setKey } from "./api.js";
import { byId } from "./format.js";

/** Returns once a key is at hand that the gateway takes; `message` says why it is asked for again. */
export async function askForKey(message = "") {
  const dialog = byId("key-dialog");
  byId("key-error").textContent = message;
  byId("key").value = "";
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const given = byId("key").value.trim();
  if (!given && hasKey()) return; // left as it was
  if (!given) return askForKey("Type the key, or ask whoever runs this gateway for one.");
  setKey(given);
  try {
    await getJson("v1/models");
  } catch (error) {
    if (error.status === 401) return askForKey("The gateway does not know this key.");
  }
}

/** Asks at the beginning if a key is needed and none is there. */
export async function prepareKey(isNeeded) {
  byId("key-button").hidden = !isNeeded;
  byId("key-button").addEventListener("click", () => askForKey());
  if (isNeeded && !hasKey()) await askForKey();
}
