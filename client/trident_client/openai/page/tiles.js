// The tiles: one number each, as the server's metrics have it, with what belongs to it.

import { byId, element, percent, short, whole } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const HISTORY = 40; // values in a small curve, one a second
const RATE_SECONDS = 5; // over which speeds are taken

const GENERATED = "vllm:generation_tokens_total";
const PROMPTS = "vllm:prompt_tokens_total";
const QUERIES = "vllm:prefix_cache_queries_total";
const HITS = "vllm:prefix_cache_hits_total";

/** What each tile shows: its number, the metrics it is made of, and a note. */
const TILES = [
  {
    name: "Running", metric: "vllm:num_requests_running", curve: true, show: whole,
    value: ({ metrics }) => metrics.sum("vllm:num_requests_running"),
    note: ({ stats }) => (stats ? `of ${whole(stats.max_num_seqs)} sequences` : ""),
  },
  {
    name: "Waiting", metric: "vllm:num_requests_waiting", curve: true, show: whole,
    value: ({ metrics }) => metrics.sum("vllm:num_requests_waiting"),
    note: () => "requests",
  },
  {
    name: "Output tokens/s", curve: true, show: short,
    value: ({ rate }) => rate(GENERATED),
    note: ({ metrics }) => `${whole(metrics.sum(GENERATED))} in all`, noteMetric: GENERATED,
  },
  {
    name: "Prompt tokens/s", curve: true, show: short,
    value: ({ rate }) => rate(PROMPTS),
    note: ({ metrics }) => `${whole(metrics.sum(PROMPTS))} in all`, noteMetric: PROMPTS,
  },
  {
    name: "KV blocks held", metric: "vllm:kv_cache_usage_perc", curve: true, show: percent,
    value: ({ metrics }) => metrics.mean("vllm:kv_cache_usage_perc"),
    note: ({ metrics }) => {
      const blocks = (kind) =>
        whole(metrics.sum("nv_trt_llm_kv_cache_block_metrics", { kv_cache_block_type: kind }));
      return `${blocks("used")} of ${blocks("max")}`;
    },
  },
  {
    name: "Prefix cache hits", show: percent,
    value: ({ metrics }) => metrics.sum(HITS) / metrics.sum(QUERIES),
    note: ({ metrics }) => `${whole(metrics.sum(HITS))} of ${whole(metrics.sum(QUERIES))} tokens`,
    noteMetric: HITS,
  },
  {
    name: "Preemptions", metric: "vllm:num_preemptions_total", show: whole,
    value: ({ metrics }) => metrics.sum("vllm:num_preemptions_total"),
    note: () => "for want of blocks",
  },
  {
    name: "Requests done", metric: "vllm:request_success_total", show: whole,
    value: ({ metrics }) => metrics.sum("vllm:request_success_total"),
    note: ({ metrics }) => `${whole(metrics.sum("trident:request_errors_total") || 0)} failed`,
    noteMetric: "trident:request_errors_total",
  },
];

export class Tiles {
  #rows = TILES.map((tile) => new Tile(tile));
  #past = []; // [milliseconds, metrics] of the last seconds

  constructor() {
    byId("tiles").replaceChildren(...this.#rows.map((row) => row.element));
  }

  /** `now` is when the metrics came, in milliseconds. */
  show(metrics, stats, now) {
    // One from before is kept, however long ago, so that there is always something to compare with.
    const recent = this.#past.filter(([at]) => now - at <= 1000 * RATE_SECONDS);
    this.#past = [...(recent.length ? recent : this.#past.slice(-1)), [now, metrics]];
    const [since, first] = this.#past[0];
    const rate = (name) => {
      const gained = metrics.sum(name) - first.sum(name);
      return now > since ? Math.max(0, gained) / ((now - since) / 1000) : 0;
    };
    for (const row of this.#rows) row.show({ metrics, stats, rate });
  }

  /** Another model, or a pause, ends what speeds and curves are made of. */
  forget() {
    this.#past = [];
  }
}

class Tile {
  #tile;
  #number = element("dd");
  #note = element("dd", "note");
  #curve = null;
  #values = [];

  constructor(tile) {
    this.#tile = tile;
    this.element = element("div", "tile");
    this.element.append(element("dt", "", tile.name), this.#number, this.#note);
    if (tile.metric) this.#number.dataset.metric = tile.metric;
    if (tile.noteMetric) this.#note.dataset.metric = tile.noteMetric;
    if (tile.curve) this.element.append((this.#curve = curveElement()));
  }

  show(seen) {
    const value = this.#tile.value(seen);
    this.#number.textContent = this.#tile.show(value);
    this.#note.textContent = this.#tile.note(seen);
    if (this.#tile.metric) this.#number.dataset.value = value;
    if (this.#tile.noteMetric) this.#note.dataset.value = seen.metrics.sum(this.#tile.noteMetric);
    if (this.#curve && Number.isFinite(value)) {
      this.#values = [...this.#values, value].slice(-HISTORY);
      drawCurve(this.#curve, this.#values);
    }
  }
}

function curveElement() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${HISTORY - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(SVG, "polygon"), document.createElementNS(SVG, "polyline"));
  return svg;
}

function drawCurve(svg, values) {
  const most = Math.max(...values) || 1;
  const left = HISTORY - values.length;
  const points = values.map((value, index) => `${left + index},${(19 - 17 * (value / most)).toFixed(1)}`);
  svg.querySelector("polyline").setAttribute("points", points.join(" "));
  svg.querySelector("polygon").setAttribute(
    "points", `${left},20 ${points.join(" ")} ${HISTORY - 1},20`);
}
