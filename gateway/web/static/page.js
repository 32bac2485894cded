// Sign in, ask every two seconds, draw what came; what this key may not see does not come.

import { ask, key, Refused, setKey } from "./gateway.js";
import { drawLengths, drawStages } from "./charts.js";
import { $, el, seconds, share, short, table, time } from "./dom.js";
import { explained } from "./explain.js";
import { CLUSTER_COLUMNS, clusterRow, drawMap } from "./map.js";

const EVERY_MS = 2000;
let timer = null;
let shown = null;

function state(text, kind = "") {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = kind;
}

function signedOut(why = "") {
  clearTimeout(timer);
  $("figures").hidden = true;
  $("leave").hidden = true;
  $("who").textContent = "";
  $("entry").hidden = false;
  $("entry-error").textContent = why;
  state("signed out");
  $("key").focus();
}

const showSections = (found) => {
  const there = { ...found, reports: found.who.reports || null };
  for (const section of document.querySelectorAll("[data-needs]")) {
    const value = there[section.dataset.needs];
    section.hidden = value === undefined || value === null || (section.dataset.needs === "lengths" && !value.length);
  }
};

function now(found) {
  const traffic = found.traffic;
  const local = traffic?.routes.local;
  const tiles = found.model ? [["model", found.model]] : [];
  if (traffic) {
    const away = Object.entries(traffic.routes).filter(([name]) => name.startsWith("remote:"));
    const sent = away.reduce((sum, [, route]) => sum + route.requests, 0);
    tiles.push(
      ["requests a second", short(traffic.per_s)],
      ["prefilled elsewhere", traffic.requests ? share(sent / traffic.requests) : "–"],
      ["waiting", String(found.queue.waiting)],
      ["threshold", `${short(found.threshold_tokens)} tokens`],
      ["first token, at home", seconds(local?.ttft_s)],
      ["first token, elsewhere", seconds(away.map(([, route]) => route.ttft_s).find((value) => value !== null))],
    );
  }
  $("now").replaceChildren(...tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

const gain = (times) => (times === null ? "without bound" : times.toFixed(2)); // nothing is served today

function drawProposal(found) {
  const one = found.proposals[0];
  if (!one) {
    $("proposal").replaceChildren(el("p", { class: "note" }, `Nothing is proposed. The loop's mode is ${found.mode}.`));
    return;
  }
  const open = one.verdict === "open";
  const split = one.kinds.map((kind, at) => `${kind}: ${one.prefill_now[at]} → ${one.prefill[at]} prefill`).join("; ");
  const card = el(
    "div",
    { class: "card" },
    el("p", {}, el("strong", {}, `Proposal ${one.number}: ${one.verdict}`), one.decided_by ? ` by ${one.decided_by}` : ""),
    el("p", {}, `${split}; threshold ${short(one.threshold)} tokens.`),
    el("p", {}, `Capacity ${short(one.lambda_now)} → ${short(one.lambda_then)} requests a second (gain ${gain(one.gain)}, surely ${gain(one.gain_surely)}); full first today: ${one.bottleneck}.`),
    el("p", {}, one.reason),
  );
  if (open && found.who.approves) {
    const decide = (word) => async (event) => {
      for (const button of event.target.parentElement.children) button.disabled = true;
      try {
        await ask(`/v1/plans/proposals/${one.number}/${word}`, { method: "POST", body: {} });
        $("proposal-said").textContent = `Proposal ${one.number}: ${word === "approve" ? "approved" : "refused"}.`;
      } catch (error) {
        $("proposal-said").textContent = error.message;
      }
      refresh();
    };
    card.append(
      el(
        "div",
        { class: "actions" },
        el("button", { type: "button", class: "main", onclick: decide("approve") }, "Approve"),
        el("button", { type: "button", onclick: decide("refuse") }, "Refuse"),
      ),
    );
  }
  $("proposal").replaceChildren(card);
}

function drawNodes(nodes) {
  const columns = ["Node", "Cluster", "Role", "State", { name: "Jobs", number: true }, { name: "Queued tokens", number: true }, { name: "Pages free", number: true }, { name: "Prefill tokens/s", number: true }];
  const rows = nodes.map((one) => [
    one.node_id,
    one.cluster,
    one.becoming ? `${one.role} → ${one.becoming}` : one.role,
    one.breaker === "open" ? "breaker open" : one.accepting ? "accepts" : one.detail || "does not accept",
    String(one.jobs),
    short(one.queued_tokens),
    one.pages_total ? `${one.pages_free}/${one.pages_total}` : null,
    short(one.prefill_tokens_per_s),
  ]);
  table($("nodes"), columns, rows, "No node has joined.");
}

function drawRequests(requests) {
  const columns = ["Request", "At", "Route", { name: "Because", why: true }, { name: "Prompt", number: true }, { name: "First token", number: true }, "Outcome"];
  const rows = requests.map((one) => [
    el("button", { type: "button", onclick: () => explain(one.request_id) }, one.request_id),
    time(one.at),
    one.route,
    one.reason?.replaceAll("_", " "),
    short(one.prompt_tokens),
    seconds(one.ttft_s),
    one.outcome,
  ]);
  table($("requests"), columns, rows, "No request in the last ten minutes.");
  $("request-ids").replaceChildren(...requests.map((one) => el("option", { value: one.request_id })));
}

// A table is drawn anew only where it differs, so that a focused button stays focused.
function once(name, value, draw) {
  const text = JSON.stringify(value);
  if (shown?.[name] === text) return;
  shown[name] = text;
  draw();
}

function draw(found) {
  $("entry").hidden = true;
  $("figures").hidden = false;
  $("leave").hidden = !key();
  $("who").textContent = `${found.who.name || "key"} (${found.who.role}${found.who.clusters ? `: ${found.who.clusters.join(", ")}` : ""})`;
  state(found.ready ? `serving, ${time(found.time)}` : `not ready: ${found.reason}`, found.ready ? "good" : "bad");
  showSections(found);
  shown ??= {};
  now(found);
  if (found.clusters) {
    const narrow = window.innerWidth < 640;
    once("map", [found.clusters, found.traffic?.routes, narrow], () => {
      $("map").replaceChildren(drawMap(found.clusters, found.traffic, narrow));
      table($("clusters"), CLUSTER_COLUMNS, found.clusters.map(clusterRow), "No cluster.");
    });
    once("nodes", found.nodes, () => drawNodes(found.nodes));
  }
  if (found.assessment) once("stages", found.assessment, () => $("stages").replaceChildren(drawStages(found.assessment)));
  if (found.lengths?.length) {
    once("lengths", [found.lengths, found.threshold_tokens], () => $("lengths").replaceChildren(drawLengths(found.lengths, found.threshold_tokens)));
  }
  if (found.proposals) once("proposals", [found.proposals, found.mode], () => drawProposal(found));
  if (found.requests) once("requests", found.requests, () => drawRequests(found.requests));
}

async function refresh() {
  clearTimeout(timer);
  try {
    draw(await ask("/v1/overview"));
  } catch (error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      const had = key() !== null;
      setKey(null);
      signedOut(had ? error.message : "");
      return;
    }
    state("the gateway does not answer", "bad");
  }
  timer = setTimeout(refresh, document.hidden ? 10 * EVERY_MS : EVERY_MS);
}

async function explain(id) {
  $("request-id").value = id;
  try {
    $("explained").replaceChildren(explained(await ask(`/v1/decisions/${encodeURIComponent(id)}`)));
  } catch (error) {
    $("explained").replaceChildren(el("p", { class: "bad" }, error.message));
  }
}

async function report(seconds) {
  const query = seconds ? `?since=${Date.now() / 1000 - seconds}` : "?";
  $("report").replaceChildren(el("p", { class: "note" }, "Making it…"));
  try {
    const page = await ask(`/v1/reports/rebalancing${query}${query === "?" ? "" : "&"}format=html`, { text: true });
    const url = URL.createObjectURL(new Blob([page], { type: "text/html" }));
    const link = el("a", { href: url, download: "rebalancing.html" }, "Save the report (one HTML page)");
    $("report").replaceChildren(el("p", {}, link, ` ${short(page.length)}B`));
  } catch (error) {
    $("report").replaceChildren(el("p", { class: "bad" }, error.message));
  }
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key").value = "";
  shown = null;
  refresh();
});
$("leave").addEventListener("click", () => {
  setKey(null);
  shown = null;
  signedOut();
});
$("explain-form").addEventListener("submit", (event) => {
  event.preventDefault();
  explain($("request-id").value.trim());
});
$("report-form").addEventListener("submit", (event) => {
  event.preventDefault();
  report(Number($("since").value));
});
document.addEventListener("visibilitychange", () => document.hidden || $("figures").hidden || refresh());

async function begin() {
  try {
    const entry = await ask("/page/entry.json");
    if (entry.key_needed && !key()) signedOut();
    else refresh();
  } catch {
    state("the gateway does not answer", "bad");
    timer = setTimeout(begin, EVERY_MS);
  }
}
begin();
