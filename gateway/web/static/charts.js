// Two plots: how full each stage is, and where the threshold cuts the lengths of prompts.

import { picture, short, svg } from "./dom.js";

const WIDTH = 420;

// Offered rate against what each stage carries; the first to be full is the bottleneck.
export function drawStages(look) {
  const limits = [
    ["prefill, all sites", look.prefill_limit],
    ["decode", look.decode_limit],
  ].filter(([, limit]) => limit !== null); // null: more than can be said
  const offered = look.rate;
  const most = Math.max(offered, ...limits.map(([, limit]) => limit)) || 1;
  const scale = (value) => (value / most) * (WIDTH - 30);
  const marks = [];
  limits.forEach(([name, limit], at) => {
    const y = 20 + at * 52;
    marks.push(svg("text", { x: 10, y, "font-size": 14 }, `${name}: carries ${short(limit)}/s`));
    marks.push(svg("rect", { class: offered > limit ? "bar over" : "bar", x: 10, y: y + 8, width: Math.max(1, scale(limit)), height: 18 }));
  });
  const bottom = 20 + limits.length * 52;
  const x = 10 + scale(offered);
  marks.push(svg("path", { class: "mark", d: `M ${x} 22 V ${bottom - 6}` }));
  marks.push(
    svg("text", { x: Math.min(x, WIDTH - 130), y: bottom + 12, "font-size": 14 }, `offered: ${short(offered)}/s`),
  );
  const told = `${short(offered)} requests a second are offered. ${limits.map(([n, l]) => `${n} carries ${short(l)}`).join(", ")}.`;
  return picture("Stage balance", told, WIDTH, bottom + 24, ...marks);
}

export function drawLengths(bins, threshold) {
  const height = 220;
  const floor = height - 44;
  const left = 16;
  const low = Math.log2(Math.max(1, bins[0].low));
  const high = Math.log2(bins[bins.length - 1].high);
  const x = (tokens) => left + ((Math.log2(Math.max(1, tokens)) - low) / Math.max(high - low, 1e-9)) * (WIDTH - 2 * left);
  const most = Math.max(...bins.map((bin) => bin.count));
  const all = bins.reduce((sum, bin) => sum + bin.count, 0);
  const above = bins.reduce((sum, bin) => sum + (bin.low >= threshold ? bin.count : 0), 0);
  const marks = bins.map((bin) => {
    const tall = (bin.count / most) * (floor - 34);
    const wide = Math.max(1, x(bin.high) - x(bin.low) - 2);
    return svg("rect", { class: bin.low >= threshold ? "bar away" : "bar", x: x(bin.low) + 1, y: floor - tall, width: wide, height: tall });
  });
  marks.push(svg("path", { class: "axis", d: `M ${left} ${floor} H ${WIDTH - left}` }));
  const every = Math.max(1, Math.ceil(bins.length / 7));
  bins.forEach((bin, at) => {
    if (at % every) return;
    marks.push(svg("text", { x: x(bin.low), y: floor + 18, "font-size": 14, "text-anchor": "middle", class: "soft" }, short(bin.low)));
  });
  marks.push(svg("text", { x: WIDTH / 2, y: height - 6, "font-size": 14, "text-anchor": "middle", class: "soft" }, "uncached tokens"));
  const at = Math.min(Math.max(x(threshold), left), WIDTH - left);
  marks.push(svg("path", { class: "mark", d: `M ${at} 24 V ${floor}` }));
  const anchor = at > WIDTH / 2 ? "end" : "start";
  marks.push(
    svg("text", { x: at + (anchor === "end" ? -6 : 6), y: 20, "font-size": 14, "text-anchor": anchor }, `threshold ${short(threshold)}`),
  );
  const told = `${all} prompts of the last ten minutes, ${above} of them above the threshold of ${threshold} tokens.`;
  return picture("Threshold over prompt lengths", told, WIDTH, height, ...marks);
}
