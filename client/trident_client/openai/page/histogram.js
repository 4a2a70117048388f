// A distribution of times, as the server's histogram has it since its start.

import { byId, element, seconds, whole } from "./format.js";

/** Shows the histogram `name` in the element `id`. */
export function showHistogram(id, metrics, name) {
  const { count, sum, buckets } = metrics.histogram(name);
  const place = byId(id);
  if (!count) {
    place.replaceChildren(element("p", "quiet", "nothing has been measured yet"));
    return;
  }
  const used = buckets.filter((bucket) => bucket.count > 0);
  const first = buckets.indexOf(used[0]);
  const shown = buckets.slice(Math.max(0, first - 1), buckets.indexOf(used.at(-1)) + 2);
  const most = Math.max(...shown.map((bucket) => bucket.count));
  const bars = element("div", "bars");
  const bounds = element("div", "bounds");
  bounds.setAttribute("aria-hidden", "true");
  shown.forEach((bucket, index) => {
    const bar = element("i", bucket.count ? "" : "empty");
    bar.style.setProperty("--share", (bucket.count / most).toFixed(4));
    bar.title = `${whole(bucket.count)} ${boundWords(bucket.bound)}`;
    bars.append(bar);
    const every = Math.ceil(shown.length / 7);
    bounds.append(element("span", "", (shown.length - 1 - index) % every ? "" : boundLabel(bucket.bound)));
  });
  const words = [
    `mean ${seconds(sum / count)}`, `half ${boundWords(quantile(buckets, count, 0.5))}`,
    `95 % ${boundWords(quantile(buckets, count, 0.95))}`, `${whole(count)} value${count === 1 ? "" : "s"}`,
  ].join(" · ");
  bars.setAttribute("role", "img");
  bars.setAttribute("aria-label", words);
  const note = element("p", "quiet", words);
  note.dataset.metric = `${name}_count`;
  note.dataset.value = count;
  place.replaceChildren(bars, bounds, note);
}

/** The bound that a share of all values does not exceed. */
function quantile(buckets, count, share) {
  let below = 0;
  for (const bucket of buckets) {
    below += bucket.count;
    if (below >= share * count) return bucket.bound;
  }
  return Infinity;
}

const boundLabel = (bound) => (bound === Infinity ? "more" : seconds(bound));
const boundWords = (bound) => (bound === Infinity ? "beyond" : `≤ ${seconds(bound)}`);
