// The live view: asks the gateway once a second, and only while somebody can see the page.

import { ApiError, getJson, getText } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { byId } from "./format.js";
import { showHistogram } from "./histogram.js";
import { askForKey } from "./keys.js";
import { Metrics } from "./prometheus.js";
import { showRequests } from "./requests.js";
import { Steps } from "./steps.js";
import { Tiles } from "./tiles.js";

const EVERY = 1000; // milliseconds

/** Begins to show the engine of the model that `model` names. */
export function startLive(model) {
  const view = { tiles: new Tiles(), map: new BlockMap(), steps: new Steps() };
  let paused = false;

  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    byId("pause").textContent = paused ? "Go on" : "Pause";
    view.tiles.forget();
  });
  byId("model").addEventListener("change", () => view.tiles.forget());

  async function loop() {
    if (!paused && !document.hidden) {
      try {
        await look(view, model());
      } catch (error) {
        if (error.status === 401) await askForKey("The key is not taken any more.");
        else tell("bad", error instanceof ApiError ? error.message : "the gateway does not answer");
      }
    }
    setTimeout(loop, EVERY);
  }
  loop();
}

async function look(view, model) {
  const asked = performance.now();
  const [[text, at], stats] = await Promise.all([
    // They are of a moment in the middle of their call; the stats may come much later.
    getText("metrics").then((all) => [all, (asked + performance.now()) / 2]),
    getJson(`stats?model=${encodeURIComponent(model)}`).catch((error) => {
      if (error.status === 401 || !(error instanceof ApiError)) throw error;
      return error; // the metrics may tell why
    }),
  ]);
  const metrics = new Metrics(text, model);
  const notes = [];
  const refused = stats instanceof ApiError;
  const known = !refused && stats.blocks ? stats : null;
  if (metrics.has("vllm:num_requests_running")) showMetrics(view, metrics, known, at);
  else notes.push("no metrics: start the gateway with --metrics-url, and the server with metrics");
  if (known) showStats(view, known);
  else notes.push(refused ? stats.message : "this server does not tell of its blocks and requests");
  byId("live-note").textContent = notes.join("; ");
  byId("live-title").closest(".panel").classList.toggle("stale", !known);
  const broken = metrics.sum("trident:engine_healthy") === 0;
  tell(broken || !known ? "bad" : "good", broken ? "the engine has failed" : known ? "live" : "no view of the engine");
}

function showMetrics(view, metrics, stats, at) {
  view.tiles.show(metrics, stats, at);
  showHistogram("ttft", metrics, "vllm:time_to_first_token_seconds");
  showHistogram("tpot", metrics, "vllm:time_per_output_token_seconds");
}

function showStats(view, stats) {
  view.map.show(stats);
  view.steps.show(stats);
  showRequests(stats);
}

function tell(state, words) {
  const place = byId("health");
  place.classList.toggle("good", state === "good");
  place.classList.toggle("bad", state === "bad");
  if (byId("health-text").textContent !== words) byId("health-text").textContent = words;
}
