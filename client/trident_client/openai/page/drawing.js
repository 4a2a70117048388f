// Canvases that are as sharp as the screen, in the theme's colors.

/** The canvas ready to be drawn on in CSS pixels, `height` of them high. */
export function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const scale = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width };
}

/** The color that a swatch has now. A custom property would give its formula. */
export const colorOf = (swatch) => getComputedStyle(swatch).backgroundColor;
