// The requests that are computed or wait, with their progress. Nothing of what they say is known here.

import { byId, element, seconds, whole } from "./format.js";

const SHOWN = 40;

export function showRequests(stats) {
  const told = stats.requests.slice(0, SHOWN);
  byId("requests").replaceChildren(...told.map(row));
  const rest = stats.num_requests - told.length;
  byId("requests-note").textContent =
    stats.num_requests === 0 ? "No request is there." : rest > 0 ? `and ${whole(rest)} more` : "";
}

function row(request) {
  const made = element("tr");
  const name = element("th", "", `#${request.id}${request.num_seqs > 1 ? ` ×${request.num_seqs}` : ""}`);
  name.scope = "row";
  const computed = Math.min(request.num_computed_tokens, request.num_prompt_tokens);
  made.append(
    name,
    element("td", request.state, state(request)),
    progress("prompt", computed, request.num_prompt_tokens),
    progress("output", request.num_output_tokens, request.max_tokens),
    element("td", "", whole(request.num_blocks)),
    element("td", "", seconds(request.seconds)),
  );
  return made;
}

function state(request) {
  if (request.num_preemptions > 0) return `${request.state}, preempted ${request.num_preemptions}×`;
  if (request.state === "running" && request.num_output_tokens === 0) return "reading";
  return request.state;
}

function progress(what, value, most) {
  const cell = element("td");
  const bar = element("progress");
  bar.max = most;
  bar.value = value;
  bar.setAttribute("aria-label", `${what} tokens`);
  cell.append(bar, `${whole(value)}/${whole(most)}`);
  return cell;
}
