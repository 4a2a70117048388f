// The map of the KV pool: a cell for each block, in the order of their numbers.

import { colorOf, prepare } from "./drawing.js";
import { byId, element, whole } from "./format.js";

const STATES = {
  free: "free", cached: "cached", held: "held", shared: "shared", fenced: "free after this step",
};
const HEIGHT = 150;
const LARGEST_CELL = 13;

export class BlockMap {
  #blocks = null;
  #counts = {};
  #swatches = {};

  constructor() {
    for (const [state, words] of Object.entries(STATES)) {
      const item = element("li");
      this.#swatches[state] = element("i", `swatch ${state}`);
      this.#counts[state] = element("b");
      item.append(this.#swatches[state], this.#counts[state], ` ${words}`);
      byId("map-legend").append(item);
    }
    const redraw = () => this.#draw();
    window.addEventListener("themechange", redraw);
    new ResizeObserver(redraw).observe(byId("map"));
  }

  show(stats) {
    this.#blocks = stats.blocks;
    const counts = Object.fromEntries(Object.keys(STATES).map((state) => [state, 0]));
    for (const [state, length] of stats.blocks.runs) counts[state] += length;
    for (const [state, count] of Object.entries(counts)) {
      this.#counts[state].textContent = whole(count);
      this.#counts[state].dataset.value = count;
    }
    const { stride } = stats.blocks;
    const sample = stride > 1 ? `, of which one in ${stride} is shown` : "";
    const told = Object.entries(STATES).map(([state, words]) => `${whole(counts[state])} ${words}`);
    byId("map").setAttribute(
      "aria-label", `${whole(stats.num_blocks)} KV blocks${sample}: ${told.join(", ")}`);
    byId("map-title").textContent =
      `${whole(stats.num_blocks)} KV blocks of ${stats.block_size} tokens${sample}`;
    this.#draw();
  }

  #draw() {
    if (!this.#blocks) return;
    const canvas = byId("map");
    const total = this.#blocks.runs.reduce((sum, [, length]) => sum + length, 0);
    const cell = cellSize(canvas.clientWidth, total);
    const columns = Math.max(1, Math.floor(canvas.clientWidth / cell));
    const { context } = prepare(canvas, Math.ceil(total / columns) * cell);
    const drawn = cell - (cell > 3 ? 1.5 : cell > 2 ? 0.5 : 0);
    let index = 0;
    for (const [state, length] of this.#blocks.runs) {
      context.fillStyle = colorOf(this.#swatches[state]);
      for (const end = index + length; index < end; index += 1) {
        context.fillRect((index % columns) * cell, Math.floor(index / columns) * cell, drawn, drawn);
      }
    }
  }
}

/** The largest whole number of pixels at which all cells fit. */
function cellSize(width, total) {
  let cell = LARGEST_CELL;
  while (cell > 2 && Math.ceil(total / Math.floor(width / cell)) * cell > HEIGHT) cell -= 1;
  return cell;
}
