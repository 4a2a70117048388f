// Numbers and elements as the page shows them.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 12,345 */
export const whole = (value) => WHOLE.format(value);

/** Few digits: 0.42, 8.3, 120, 12,345. */
export function short(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0 || value >= 100) return whole(value);
  return value.toFixed(value < 1 ? 2 : 1);
}

/** 42 % of 0.42; what is not nothing is not shown as nothing. */
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  if (share > 0 && share < 0.1) return `${(100 * share).toFixed(1)} %`;
  return `${(100 * share).toFixed(0)} %`;
}

/** Seconds as 0.4 ms, 25 ms or 1.5 s. */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  const thousandths = 1000 * value;
  return `${thousandths.toFixed(thousandths < 10 ? 1 : 0).replace(/\.0$/, "")} ms`;
}

/** An element with its text; never anything of markup. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export const byId = (id) => document.getElementById(id);
