"""How the page looks: one sheet, light and dark, for screens and for paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1c1f23; --soft: #5b636d; --line: #e3e4e0;
  --good: #007a5a; --bad: #b84300; --accent: #0072b2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --card: #1c2024; --ink: #e8e9ea; --soft: #a2aab3; --line: #31373d;
    --good: #4fc9a4; --bad: #f08a4b; --accent: #6cb9e8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15.5px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1040px; margin: 0 auto; padding: 44px 24px 72px; }
header p.kicker { margin: 0 0 4px; color: var(--soft); font-size: 13px; letter-spacing: .02em; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; font-weight: 680; letter-spacing: -.015em; }
h2 { margin: 52px 0 4px; font-size: 19px; font-weight: 660; letter-spacing: -.008em; }
p { max-width: 74ch; margin: 6px 0 14px; }
p.verdict { font-size: 17.5px; line-height: 1.5; margin: 14px 0 26px; }
p.note, figcaption, .sub { color: var(--soft); }
p.note { font-size: 14px; }
.cards, .curves { display: flex; flex-wrap: wrap; gap: 14px; }
.card { flex: 1 1 160px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 15px 18px 13px; }
.card .name { font-size: 13px; color: var(--soft); }
.card .value { font-size: 28px; font-weight: 640; letter-spacing: -.02em; line-height: 1.25; }
.card .value small { font-size: 15px; font-weight: 450; color: var(--soft); letter-spacing: 0; margin-left: 3px; }
.card .sub { font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); }
figure { margin: 12px 0 8px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px 10px; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 660px; height: auto; font-family: inherit; }
.curves figure svg { min-width: 0; }
figcaption { font-size: 13px; margin: 2px 0 6px; }
figcaption b { color: var(--ink); font-weight: 620; font-size: 14px; }
.curves figure { margin: 0; flex: 1 1 400px; max-width: 560px; }
details { margin: 8px 0; font-size: 14px; }
summary { cursor: pointer; color: var(--accent); }
table { border-collapse: collapse; font-size: 13.5px; margin: 8px 0; }
th, td { padding: 4px 16px 4px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 560; color: var(--soft); } th:first-child, td:first-child, .words { text-align: left; }
.scroll { overflow-x: auto; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-x: auto; }
ul.problems { padding-left: 20px; font-size: 14px; }
footer { margin-top: 56px; color: var(--soft); font-size: 13px; border-top: 1px solid var(--line); padding-top: 12px; }
@media print {
  body { font-size: 12px; background: #fff; } main { max-width: none; padding: 0; }
  figure, .card { break-inside: avoid; } h2 { break-after: avoid; }
}
"""
