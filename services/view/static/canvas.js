// A canvas that is as sharp as the screen and as wide as its box.

import { h } from "./dom.js";

export function canvas(height, label, draw) {
  const surface = h("canvas", { role: "img", "aria-label": label });
  const box = h("div", { class: "canvas" }, surface);
  const redraw = () => {
    const width = box.clientWidth;
    if (!width) return;
    surface.width = width * devicePixelRatio;
    surface.height = height * devicePixelRatio;
    surface.style.height = `${height}px`;
    const pen = surface.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    pen.font = "12px system-ui, sans-serif";
    draw(pen, width, height);
  };
  new ResizeObserver(redraw).observe(box);
  return { box, surface, redraw };
}
