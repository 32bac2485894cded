"""The report's style sheet: quiet, legible on light and dark, in a wide window and in a narrow one, and on paper."""

STYLE = """
:root { color-scheme: light dark; --paper: #fdfcfa; --ink: #1f2328; --muted: #5c6470; --rule: #e3e0da;
  --grid: #ece9e3; --home: #2f6db5; --away: #b8560f; --speak: #2b7f57; --warm: #a03328; --cell: #2f6db5;
  --now: #fdfcfa; --best: #e08a1e; --panel: #f5f3ee; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e6e1; --muted: #a3a8b0; --rule: #33373e;
  --grid: #282c32; --home: #6ea4e0; --away: #e79a55; --speak: #67c093; --warm: #ef8a7d; --cell: #5b97dc;
  --now: #16181c; --best: #f0a94a; --panel: #1d2025; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55; font-size: 16px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 48px 40px 96px; }
h1 { font-size: 30px; line-height: 1.2; font-weight: 600; letter-spacing: -0.01em; margin: 0 0 8px; }
h2 { font-size: 20px; font-weight: 600; margin: 64px 0 8px; }
h3 { font-size: 16px; font-weight: 600; margin: 32px 0 4px; }
p { margin: 8px 0; max-width: 68ch; overflow-wrap: anywhere; }
.when, .note, figcaption { color: var(--muted); }
.note, figcaption { font-size: 14px; max-width: 78ch; }
.verdict { font-size: 19px; line-height: 1.45; border-left: 3px solid var(--home); padding-left: 18px; margin: 32px 0; }
.verdict strong { font-weight: 600; }
.keys { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 24px 32px; margin: 32px 0 0;
  padding: 0; }
.keys div { border-top: 1px solid var(--rule); padding-top: 10px; }
.keys dt { font-size: 14px; color: var(--muted); }
.keys dd { margin: 0; font-size: 22px; font-variant-numeric: tabular-nums; }
.keys small { display: block; font-size: 14px; color: var(--muted); }
.unknown { background: var(--panel); border-radius: 6px; padding: 14px 20px; margin: 24px 0; }
.unknown ul { margin: 4px 0; padding-left: 20px; }
figure { margin: 20px 0 8px; } figcaption { margin-top: 10px; }
.plot { display: block; max-width: 100%; height: auto; overflow: visible; }
.plot.narrow { display: none; }
.plot text { font-size: 13px; fill: var(--ink); font-variant-numeric: tabular-nums; }
.plot text.axis { fill: var(--muted); }
.plot .strong { font-weight: 600; }
.plot .home { fill: var(--home); } .plot .away { fill: var(--away); } .plot .speak { fill: var(--speak); }
.plot .home-text { fill: var(--home); } .plot .away-text { fill: var(--away); }
.plot .grid { stroke: var(--grid); } .plot .base { stroke: var(--muted); }
.plot .mark { stroke: var(--ink); stroke-width: 1.6; } .plot .dashed { stroke-dasharray: 5 4; }
.plot .event { stroke: var(--muted); stroke-dasharray: 1 4; stroke-linecap: round; stroke-width: 2; }
.plot .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.plot .p50 { stroke: var(--home); } .plot .p90 { stroke: var(--away); } .plot .p99 { stroke: var(--warm); }
.plot .p50-text { fill: var(--home); } .plot .p90-text { fill: var(--away); } .plot .p99-text { fill: var(--warm); }
.plot .area { fill: var(--away); fill-opacity: 0.16; } .plot .away-line { stroke: var(--away); }
.plot .cell { fill: var(--cell); shape-rendering: crispEdges; }
.plot .now { fill: var(--now); stroke: var(--ink); stroke-width: 2.5; }
.plot .best { fill: var(--best); stroke: var(--ink); stroke-width: 1.2; }
.plot .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 5px; stroke-linejoin: round; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; margin: 12px 0; }
th, td { text-align: left; padding: 6px 20px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; color: var(--muted); white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; }
td { white-space: nowrap; } td.long { white-space: normal; min-width: 20ch; overflow-wrap: anywhere; }
td.n, th.n { text-align: right; }
details { margin: 8px 0 0; } summary { cursor: pointer; color: var(--muted); font-size: 14px; }
:focus-visible { outline: 2px solid var(--home); outline-offset: 3px; }
@media (max-width: 860px) { .plot.wide { display: none; } .plot.narrow { display: block; width: min(100%, 480px); } }
@media (max-width: 640px) { main { padding: 28px 18px 64px; } h1 { font-size: 25px; } h2 { margin-top: 48px; }
  .keys { gap: 18px 24px; grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media print { main { max-width: none; padding: 0; } h2, figure { break-inside: avoid; } summary { display: none; } }
"""
