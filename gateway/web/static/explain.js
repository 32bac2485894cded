// One request: what was known, which ways there were, and what came of each attempt.

import { el, rate, seconds, share, short, table } from "./dom.js";

const where = (option) => (option.cluster === null ? "in place" : `${option.cluster}: ${option.prefill_node ?? "–"}`);

function options(decision) {
  const target = el("table", {}, el("caption", {}, "The ways that there were"));
  const columns = [
    "Prefill",
    "Decode",
    { name: "To compute", number: true },
    { name: "To send", number: true },
    { name: "TTFT predicted", number: true },
    { name: "Cost", number: true },
    "Allowed",
  ];
  const rows = decision.options.map((one) => [
    where(one),
    one.decode_node,
    short(one.compute_increment),
    `${short(one.wire_bytes)}B`,
    seconds(one.predicted_ttft_s),
    seconds(one.cost_s),
    one.allowed ? "yes" : `no: ${one.barred ?? "not permitted"}`,
  ]);
  table(target, columns, rows, "none");
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Ways" }, target);
}

function attempts(record) {
  const target = el("table", {}, el("caption", {}, "What was tried"));
  const columns = ["Try", "Prefill", "Decode", "Codec", { name: "On the wire", number: true }, { name: "Rate", number: true }, "Outcome"];
  const rows = record.attempts.map((one) => [
    String(one.attempt),
    one.prefill_node ?? "in place",
    one.decode_node,
    one.codec ?? "none",
    one.wire_bytes === undefined ? null : `${short(one.wire_bytes)}B`,
    one.transfer_s ? rate(one.wire_bytes / one.transfer_s) : null,
    one.cause ? `${one.stage}: ${one.cause}` : one.outcome,
  ]);
  table(target, columns, rows, "nothing");
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Tries" }, target);
}

export function explained(record) {
  const decision = record.decision;
  const request = decision?.facts?.request;
  const usage = record.usage ?? {};
  const cached = usage.cached_tokens ?? null;
  const facts = [
    `Route: ${record.route ?? "refused"}${decision ? `, because ${decision.reason.replaceAll("_", " ")}` : ""}.`,
    request ? `${request.prompt_tokens} prompt tokens${cached === null ? "" : `, ${share(cached / request.prompt_tokens)} of them cached`}.` : "",
    `First token after ${seconds(record.ttft_s)}, of which ${seconds(record.queue_s)} in the queue; ${record.outcome}.`,
  ];
  return el(
    "div",
    { class: "card" },
    facts.filter(Boolean).map((fact) => el("p", {}, fact)),
    decision ? options(decision) : el("p", {}, "No decision was made."),
    attempts(record),
  );
}
