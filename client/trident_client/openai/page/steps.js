// How many sequences each of the newest steps computed: those that decode, those that read prompts.

import { colorOf, prepare } from "./drawing.js";
import { byId, short, whole } from "./format.js";

const HEIGHT = 72;
const SHOWN = 256;

export class Steps {
  #steps = [];
  #most = 1;

  constructor() {
    const redraw = () => this.#draw();
    window.addEventListener("themechange", redraw);
    new ResizeObserver(redraw).observe(byId("steps"));
  }

  show(stats) {
    this.#steps = stats.steps;
    this.#most = stats.max_num_seqs;
    const sizes = this.#steps.map(([, one, several]) => one + several);
    const mean = sizes.reduce((a, b) => a + b, 0) / sizes.length;
    const words = sizes.length
      ? `last ${sizes.length}: mean ${short(mean)}, most ${whole(Math.max(...sizes))}`
      : "no step has been computed yet";
    byId("steps-note").textContent = words;
    byId("steps").setAttribute("aria-label", `Sequences in each step, ${words}`);
    this.#draw();
  }

  #draw() {
    const { context, width } = prepare(byId("steps"), HEIGHT);
    const wide = width / SHOWN;
    const largest = Math.max(4, ...this.#steps.map(([, one, several]) => one + several));
    const unit = (HEIGHT - 6) / Math.min(this.#most, largest * 1.15);
    const left = SHOWN - this.#steps.length;
    const colors = [colorOf(byId("swatch-one")), colorOf(byId("swatch-several"))];
    this.#steps.forEach(([, one, several], index) => {
      let bottom = HEIGHT;
      [one, several].forEach((count, kind) => {
        context.fillStyle = colors[kind];
        const high = count * unit;
        context.fillRect((left + index) * wide, bottom - high, Math.max(1, wide - 0.6), high);
        bottom -= high;
      });
    });
  }
}
