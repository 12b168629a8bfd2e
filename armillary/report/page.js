// Unpacks Plotly, draws the charts, and gives them the colors of the page, now and when
// the system changes them.
(async () => {
  const charts = document.querySelectorAll(".chart");
  if (!charts.length) return;
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  const options = { responsive: true, displaylogo: false };
  for (const chart of charts) {
    const { data, layout } = JSON.parse(chart.dataset.figure);
    await Plotly.newPlot(chart, data, layout, options);
  }
  const paint = () => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: color("--line"), linecolor: color("--line"), zerolinecolor: color("--line") };
    const changes = {
      "font.color": color("--text"),
      "hoverlabel.bgcolor": color("--page"),
      "hoverlabel.font.color": color("--text"),
    };
    for (const [name, value] of Object.entries(axis)) {
      changes[`xaxis.${name}`] = value;
      changes[`yaxis.${name}`] = value;
    }
    for (const chart of charts) Plotly.relayout(chart, changes);
  };
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
})();
