// Gives the charts the colors of the page, now and when the system changes them.
(() => {
  const charts = () => document.querySelectorAll(".js-plotly-plot");
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
    for (const chart of charts()) Plotly.relayout(chart, changes);
  };
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
})();
