"""How a page looks: light and dark, on a desk, on a telephone and on paper."""

STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1b1f24;--muted:#626b76;--rule:#e2e5e9;--soft:#f6f7f8;--good:#00734f;
--bad:#b3261e;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#a5528f;--c4:#a87400;--c5:#4a5560;--env:#0072b2;
--act:#56b4e9;--load:#c99700;--learn:#009e73;--reduce:#b565a7;--evaluate:#d55e00;--check:#7a4fb0;--copy:#8f6d4a;
--other:#b4bac2}
@media (prefers-color-scheme:dark){:root{--page:#121518;--ink:#e4e7ea;--muted:#98a2ad;--rule:#2a3037;--soft:#1a1e22;
--good:#35c795;--bad:#ff8a80;--c0:#56b4e9;--c1:#ff8f4d;--c2:#2cc797;--c3:#dd8fc6;--c4:#e8b339;--c5:#b9c1ca;--env:#3c92d0;
--act:#7cc8f2;--load:#d9ab2f;--learn:#22b384;--reduce:#c987bd;--evaluate:#f08347;--check:#a583d6;--copy:#b3906c;
--other:#5d6670}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:2.5rem 1.25rem 4rem;max-width:62rem;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;overflow-wrap:break-word}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .35rem;letter-spacing:-.015em}
h2{font-size:1.1rem;margin:3rem 0 1rem;padding-top:1rem;border-top:1px solid var(--rule)}
h3{font-size:.95rem;margin:1.5rem 0 .4rem}
p{margin:.5rem 0}
.lead,.quiet,small,figcaption span,footer{color:var(--muted)}
.quiet{font-size:.87rem}
code{font:.86em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.good{color:var(--good)}.bad{color:var(--bad)}
.top{display:flex;gap:2rem;align-items:flex-start;flex-wrap:wrap}
.top>*{flex:1 1 22rem;min-width:0}.top>.films{flex:0 1 15rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(6.8rem,1fr));gap:1.25rem 1.25rem;margin:1.5rem 0 0}
.tiles div{min-width:0}
dt{font-size:.8rem;color:var(--muted)}
dd{margin:0;font-size:1.28rem;line-height:1.35;font-weight:600;letter-spacing:-.015em;font-variant-numeric:tabular-nums;
white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.tiles small{font-size:.8rem}
.films{display:flex;flex-wrap:wrap;gap:1rem;margin:1.5rem 0 0}
.films figure{flex:1 1 10rem;max-width:18rem}
.films img{display:block;width:100%;border-radius:6px}
figure{margin:0;min-width:0}
figcaption{font-size:.87rem;margin:0 0 .3rem;line-height:1.4}
figcaption b{font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(17rem,100%),1fr));gap:1.75rem 1.5rem;
margin:1rem 0}
.charts.wide{grid-template-columns:repeat(auto-fill,minmax(min(26rem,100%),1fr))}
/* Charts of a row stand on one line, however long the words above them are. */
.charts figure{display:flex;flex-direction:column}.charts .chart{margin-top:auto}
svg{display:block;width:100%;height:auto}
.chart text{font-size:11.5px;fill:var(--muted);font-variant-numeric:tabular-nums}
.chart .y{text-anchor:end}.chart .x{text-anchor:middle}
.chart .grid{stroke:var(--rule);stroke-width:1}
.chart path{fill:none;stroke:var(--c);stroke-linejoin:round;stroke-linecap:round}
.chart .line{stroke-width:2}.chart .thin{stroke-width:1;opacity:.38}
.chart .band{fill:var(--c);stroke:none;opacity:.17}
.chart .dashed .line{stroke-dasharray:5 4}
.chart circle{fill:var(--c)}
.strips rect{fill:transparent}.strips line{stroke:var(--muted);stroke-width:1;opacity:0}
.strips g:hover line{opacity:.7}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.4rem;font-size:.87rem;margin:.5rem 0 1rem}
.legend i,.swatch,.words i{display:inline-block;width:.75em;height:.75em;border-radius:2px;background:var(--c);
margin-right:.45em}
.legend i.dashed{background:repeating-linear-gradient(90deg,var(--c) 0 3px,transparent 3px 5px)}
.bars>div{display:grid;grid-template-columns:minmax(0,1fr);gap:.2rem;margin:.6rem 0}
.bars span{font-size:.87rem}
.bar{display:flex;height:1.35rem;border-radius:4px;overflow:hidden;background:var(--soft)}
.bar i{display:block;background:var(--c);min-width:0}
ul.words{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.5rem;margin:.6rem 0 0;padding:0;font-size:.87rem}
.words b{font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;font-size:.87rem;min-width:min(100%,20rem)}
th,td{padding:.38rem .9rem .38rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
thead th{color:var(--muted);font-weight:500;white-space:nowrap}
tbody th{font-weight:500}
.figures td,.figures thead th:not(:first-child){text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.figures th:first-child{white-space:nowrap}
.runs td:nth-child(-n+3),.runs thead th:nth-child(-n+3){text-align:left!important}
.config{columns:3 17rem;column-gap:2.5rem}
.config>div{break-inside:avoid-column}
.config table{width:100%;table-layout:fixed;font-size:.82rem}
.config thead{display:none}.config .scroll{margin:.2rem 0 1rem}
.config td,.config th{padding:.2rem .5rem .2rem 0;overflow-wrap:anywhere}
.config tbody th{color:var(--muted);font-weight:400}
.config h3{margin:0;padding-top:.6rem}
details{margin:.9rem 0}
summary{cursor:pointer;font-size:.9rem;color:var(--muted)}
summary:hover{color:var(--ink)}
summary:focus-visible{outline:2px solid var(--c0);outline-offset:3px;border-radius:2px}
svg.bench{max-width:46rem}
footer{margin-top:3.5rem;padding-top:1rem;border-top:1px solid var(--rule);font-size:.82rem}
@media (max-width:32rem){body{padding:1.5rem 1rem 3rem}h1{font-size:1.45rem}.wide .chart text{font-size:14px}
.tiles{grid-template-columns:repeat(auto-fill,minmax(6rem,1fr))}dd{font-size:1.15rem}}
@media print{:root{color-scheme:light;--page:#fff;--ink:#000;--muted:#555;--rule:#ccc}
body{max-width:none;padding:0;font-size:10pt}
figure,tr{break-inside:avoid}details::details-content{content-visibility:visible;block-size:auto}.strips{display:none}
.charts{grid-template-columns:repeat(3,1fr);gap:1rem}.charts.wide{grid-template-columns:1fr 1fr}h2{margin-top:1.5rem}
h2,h3,figcaption,summary{break-after:avoid}
.bar,.bar i,i,.chart *{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
