// Asking the gateway, with the key of this tab. Nothing else is ever asked.

const KEY = "prfaas.key";
const LATE_MS = 15000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY);
export const setKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

export async function ask(path, { method = "GET", body = null, text = false } = {}) {
  const headers = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== null) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    body: body === null ? undefined : JSON.stringify(body),
    signal: AbortSignal.timeout(LATE_MS),
    cache: "no-store",
  });
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, told.error?.message ?? `the gateway answered ${answer.status}`);
  }
  return text ? answer.text() : answer.json();
}
