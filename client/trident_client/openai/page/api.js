// Calls to the gateway that this page came from. Each carries the key, once there is one.

const STORED = "trident-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => Boolean(sessionStorage.getItem(STORED));
export const setKey = (key) => sessionStorage.setItem(STORED, key);

/** The response to a call that went well; throws an ApiError with the gateway's own words. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(STORED)}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

export const getJson = async (path) => (await call(path)).json();
export const getText = async (path) => (await call(path)).text();

export function postJson(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway answered with status ${response.status}`;
  }
}

/** The JSON of each event of a stream. Throws if it ends without its last mark. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The stream broke off");
    unread += value;
    const parts = unread.split("\n\n");
    unread = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment that bridges a wait
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error.message);
      yield event;
    }
  }
}
