// The clusters around home, and the ways between: as wide as they are fast, red where congested.

import { picture, rate, seconds, share, svg } from "./dom.js";

const BOX = { width: 230, height: 102 };
const GAP = 24;
const MARGIN = 4;
const WIDE = 760;
const NARROW = { width: 380, left: 44, below: 46 };

const NAME_CHARS = 18;
const LINE_CHARS = 30;

// What a box has room for; the table below has the whole of it.
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const words = (cluster) => (cluster.state === "active" ? `${cluster.accepting} of ${cluster.nodes} nodes accept` : cluster.state);

function box(cluster, x, y, width, routed, lines = []) {
  const height = BOX.height + (lines.length ? NARROW.below : 0);
  const said = [words(cluster), cluster.region || (cluster.local ? "home" : "region not said"), routed === null ? "" : `${share(routed)} of prompts`];
  const kind = cluster.local ? "home" : "remote";
  return svg(
    "g",
    {},
    svg("rect", { class: `panel ${kind}`, x, y, width, height, rx: 10, "stroke-width": 2 }),
    svg("text", { x: x + 14, y: y + 26, "font-size": 17, "font-weight": 600 }, cut(cluster.name, NAME_CHARS)),
    [...said, ...lines].map((line, at) => svg("text", { x: x + 14, y: y + 49 + 21 * at, "font-size": 14, class: "soft" }, cut(line, LINE_CHARS))),
  );
}

// What is said of a way, how it is drawn, and how wide.
function wayOf({ link }) {
  const known = link.bytes_per_s !== null;
  const bad = link.congested || link.dead;
  return {
    said: known ? `${rate(link.bytes_per_s)}, ${seconds(link.rtt_s)}` : "no transfer yet",
    state: link.dead ? "nothing moves" : link.congested ? "congested" : known ? `${share(link.utilisation)} in use` : "not measured",
    looks: {
      class: ["way", bad ? "bad" : "", known ? "" : "unknown"].join(" "),
      "stroke-width": known ? Math.min(18, 2 + 2 * Math.log10(1 + link.bytes_per_s / 1e5)) : 2,
    },
  };
}

function sideBySide(others, home, routed) {
  const rows = Math.max(1, others.length);
  const height = rows * (BOX.height + GAP) + GAP;
  const right = WIDE - BOX.width - MARGIN;
  const middle = (height - BOX.height) / 2;
  const marks = [];
  others.forEach((cluster, at) => {
    const y = GAP + at * (BOX.height + GAP);
    const from = { x: MARGIN + BOX.width, y: y + BOX.height / 2 };
    const to = { x: right, y: home ? middle + ((at + 1) / (rows + 1)) * BOX.height : from.y };
    const bend = (from.x + 3 * to.x) / 4; // late, so that the words at its beginning stay clear of it
    const way = wayOf(cluster);
    marks.push(
      svg("path", { ...way.looks, d: `M ${from.x} ${from.y} C ${bend} ${from.y} ${bend} ${to.y} ${to.x} ${to.y}` }),
      svg("text", { x: from.x + 14, y: from.y - 16, "font-size": 14 }, way.said),
      svg("text", { x: from.x + 14, y: from.y + 28, "font-size": 14, class: "soft" }, way.state),
      box(cluster, MARGIN, y, BOX.width, routed(cluster)),
    );
  });
  if (home) marks.push(box(home, right, middle, BOX.width, routed(home)));
  return [WIDE, height, marks];
}

// For a phone: one below the other, the ways along the left edge.
function stacked(others, home, routed) {
  const width = NARROW.width - NARROW.left - MARGIN;
  const tall = BOX.height + NARROW.below;
  const bottom = GAP + others.length * (tall + GAP);
  const marks = [];
  others.forEach((cluster, at) => {
    const y = GAP + at * (tall + GAP);
    const way = wayOf(cluster);
    const edge = 10 + 24 * ((at + 1) / (others.length + 1));
    const target = bottom + 20 + 60 * ((at + 1) / (others.length + 1));
    marks.push(
      svg("path", { ...way.looks, d: `M ${NARROW.left} ${y + tall / 2} H ${edge} V ${target} H ${NARROW.left}` }),
      box(cluster, NARROW.left, y, width, routed(cluster), [way.said, way.state]),
    );
  });
  if (home) marks.push(box(home, NARROW.left, bottom, width, routed(home)));
  return [NARROW.width, bottom + BOX.height + GAP, marks];
}

export function drawMap(clusters, traffic, narrow) {
  const home = clusters.find((one) => one.local);
  const others = clusters.filter((one) => !one.local);
  const routed = (cluster) => {
    if (!traffic?.requests) return null;
    const name = cluster.local ? "local" : `remote:${cluster.name}`;
    return (traffic.routes[name]?.requests ?? 0) / traffic.requests;
  };
  const [width, height, marks] = (narrow ? stacked : sideBySide)(others, home, routed);
  const told = others.map((one) => `${one.name}: ${rate(one.link.bytes_per_s)}${one.link.congested ? ", congested" : ""}`);
  return picture("Clusters and ways", told.join("; ") || "No remote cluster is registered.", width, height, ...marks);
}

export const clusterRow = (one) => [
  one.name,
  one.local ? "home" : one.state,
  `${one.accepting}/${one.nodes}`,
  one.local ? null : rate(one.link.bytes_per_s),
  one.local ? null : seconds(one.link.rtt_s),
  one.local ? null : one.link.dead ? "nothing moves" : one.link.congested ? "congested" : share(one.link.utilisation),
  one.breaker,
  one.audits ? (one.audits.flagged ? "flagged" : `${one.audits.passed} passed, ${one.audits.failed} failed`) : null,
];

export const CLUSTER_COLUMNS = [
  "Cluster",
  "State",
  { name: "Accepting", number: true },
  { name: "Rate", number: true },
  { name: "Round trip", number: true },
  "Way",
  "Breaker",
  "KV audits",
];
