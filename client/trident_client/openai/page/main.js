// Brings the page to life: the key first, then the models, then the two halves.

import { getJson } from "./api.js";
import { startChat } from "./chat.js";
import { byId, element } from "./format.js";
import { askForKey, prepareKey } from "./keys.js";
import { startLive } from "./live.js";
import { summarizeSettings } from "./settings.js";

async function loadModels() {
  try {
    const { data } = await getJson("v1/models");
    byId("model").replaceChildren(...data.map(({ id }) => element("option", "", id)));
  } catch (error) {
    if (error.status !== 401) throw error;
    await askForKey("The key is not taken any more.");
    await loadModels();
  }
}

summarizeSettings();
const { needs_key: needsKey } = await (await fetch("page/config.json")).json();
await prepareKey(needsKey);
await loadModels();
const model = () => byId("model").value;
startChat(model);
startLive(model);
document.body.dataset.ready = "true";
