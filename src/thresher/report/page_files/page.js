// Draws the charts in the colors of the page, and switches between light and dark.
(() => {
  "use strict";
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = new Map();

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // one object per point from columns
  const rows = (series) =>
    series.flatMap(({ labels, columns }) => {
      const names = Object.keys(columns);
      return columns[names[0]].map((_, i) => ({ ...labels, ...Object.fromEntries(names.map((n) => [n, columns[n][i]])) }));
    });

  const config = (width) => {
    const text = color("text"), muted = color("muted"), grid = color("grid");
    const fonts = { labelFontSize: 12, titleFontSize: 12 };
    return {
      background: null,
      font: "system-ui, sans-serif",
      view: { stroke: null },
      axis: { ...fonts, labelColor: muted, titleColor: muted, titleFontWeight: "normal", gridColor: grid, domainColor: grid, tickColor: grid },
      axisX: { labelFlush: true, tickCount: Math.max(3, Math.floor(width / 80)) },
      axisY: { tickCount: 5 },
      legend: { ...fonts, orient: "top", labelColor: text, titleColor: muted, labelLimit: width - 60, columns: width < 420 ? 1 : 3, symbolStrokeWidth: 3, symbolType: "stroke", symbolSize: 220, symbolOpacity: 1, symbolBaseStrokeColor: muted },
      range: { category: color("series").split(",").map((each) => each.trim()) },
      rule: { color: muted },
    };
  };

  const draw = async (chart) => {
    const element = document.getElementById(`chart-${chart.id}`);
    const spec = { ...chart.spec, data: { values: rows(chart.series) }, autosize: { type: "fit-x", contains: "padding" } };
    const options = {
      config: config(element.clientWidth), mode: "vega-lite", renderer: "svg", actions: false, ast: true,
      tooltip: { disableDefaultStyle: false },
    };
    views.get(chart.id)?.finalize();
    views.set(chart.id, await vegaEmbed(element, spec, options));
  };

  const drawAll = async () => {
    for (const chart of charts) await draw(chart);
    root.dataset.drawn = isDark() ? "dark" : "light";
  };

  const button = document.getElementById("theme");
  const label = () => (button.textContent = isDark() ? "Light" : "Dark");
  const choose = (theme) => {
    root.dataset.theme = theme;
    try { localStorage.setItem("thresher-theme", theme); } catch { /* a browser may forbid it for local files */ }
  };
  try { if (localStorage.getItem("thresher-theme")) root.dataset.theme = localStorage.getItem("thresher-theme"); } catch { /* as above */ }
  button.hidden = false;
  button.addEventListener("click", () => { choose(isDark() ? "light" : "dark"); label(); drawAll(); });
  prefersDark.addEventListener("change", () => { label(); drawAll(); });
  label();
  drawAll();
})();
