// Draws the cells of the heat map as a picture.

/**
 * Returns the cells of the rows from `first` to `stop` in at most `width` by `height` pixels: one
 * pixel per cell, or one per screen pixel if cells are smaller. Null without any.
 */
export function cellPicture({ panels, stored, palette }, panel, { first, stop, width, height }) {
  const { data, places, columns: shownColumns } = panels[panel];
  const numColumns = shownColumns.length;
  const hasBad = data.nonfiniteRows.size > 0;
  const numRows = stop - first;
  const columns = Math.min(numColumns, width);
  const rows = Math.min(numRows, height);
  if (!columns || !rows) return null;
  const pixels = new Uint32Array(columns * rows);
  for (let y = 0; y < rows; y += 1) {
    const top = first + Math.floor((y * numRows) / rows);
    const bottom = Math.max(top + 1, first + Math.floor(((y + 1) * numRows) / rows));
    for (let x = 0; x < columns; x += 1) {
      const start = Math.floor((x * numColumns) / columns);
      const end = Math.max(start + 1, Math.floor(((x + 1) * numColumns) / columns));
      // Of several cells in one pixel show the furthest from 1, so that no outlier is lost.
      let shown = NaN;
      let isBad = false;
      for (let row = top; row < bottom; row += 1) {
        if (places[row] < 0) continue;
        for (let place = start; place < end; place += 1) {
          const column = shownColumns[place];
          if (column < 0) continue;
          isBad ||= hasBad && data.bad(column, places[row]) > 0;
          const value = data.value(column, places[row], stored);
          if (value !== value) continue;
          if (shown !== shown || shown === -Infinity) shown = value;
          else if (value !== -Infinity && Math.abs(value) > Math.abs(shown)) shown = value;
        }
      }
      pixels[y * columns + x] = isBad ? palette.badPixel : palette.pixel(shown);
    }
  }
  const canvas = new OffscreenCanvas(columns, rows);
  const image = new ImageData(new Uint8ClampedArray(pixels.buffer), columns, rows);
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

/** Returns thin diagonal lines, which mean that nothing was measured. */
export function hatching(context, color) {
  const tile = new OffscreenCanvas(6, 6);
  const pen = tile.getContext('2d');
  pen.strokeStyle = color;
  pen.beginPath();
  pen.moveTo(-1, 7);
  pen.lineTo(7, -1);
  pen.stroke();
  return context.createPattern(tile, 'repeat');
}
