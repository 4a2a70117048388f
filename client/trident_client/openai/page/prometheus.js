// Reads the text format of metrics, and asks it for the numbers of one model.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export class Metrics {
  #series = new Map(); // name to [{labels, value}]

  constructor(text, model) {
    for (const line of text.split("\n")) {
      const found = line.startsWith("#") ? null : LINE.exec(line);
      if (!found) continue;
      const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map((m) => [m[1], m[2]]));
      if (labels.model !== undefined && labels.model !== model) continue;
      if (!this.#series.has(found[1])) this.#series.set(found[1], []);
      this.#series.get(found[1]).push({ labels, value: Number(found[3]) });
    }
  }

  has(name) {
    return this.#series.has(name);
  }

  /** The sum of a metric over the model's instances, of the series with these labels; NaN if none. */
  sum(name, labels = {}) {
    const values = (this.#series.get(name) ?? [])
      .filter((one) => Object.entries(labels).every(([key, value]) => one.labels[key] === value))
      .map((one) => one.value);
    return values.length ? values.reduce((a, b) => a + b) : NaN;
  }

  /** The mean over the model's instances. */
  mean(name) {
    return this.sum(name) / (this.#series.get(name)?.length ?? 1);
  }

  /** {count, sum, buckets: [{bound, count}]}, each bucket by itself and not with those below it. */
  histogram(name) {
    const upTo = new Map();
    for (const { labels, value } of this.#series.get(`${name}_bucket`) ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      upTo.set(bound, (upTo.get(bound) ?? 0) + value);
    }
    const bounds = [...upTo.keys()].sort((a, b) => a - b);
    const buckets = bounds.map((bound, index) => ({
      bound, count: upTo.get(bound) - (index ? upTo.get(bounds[index - 1]) : 0),
    }));
    return { count: this.sum(`${name}_count`), sum: this.sum(`${name}_sum`), buckets };
  }
}
