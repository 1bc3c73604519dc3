// The colors of log2 RMS: blue below 1 and orange above, distinct for every kind of color vision.
// Unit scale has the color of the page, so that other scales stand out.

const STOPS = {
  light: ['#08306b', '#2166ac', '#6baed6', '#f4f4f2', '#fdae61', '#d95f0e', '#7f2704'],
  dark: ['#d6ecff', '#6db4f2', '#2a6aa8', '#24272c', '#a8560f', '#f59a45', '#ffe9cf'],
};
const ZERO = { light: '#b9bcc2', dark: '#565b64' };
// Far from both colors.
const BAD = { light: '#c40a8f', dark: '#ff6ad5' };
const STEPS = 512;

/** The colors of a theme between -limit and limit. */
export class Palette {
  constructor(theme, limit) {
    this.theme = theme;
    this.limit = limit;
    this.stops = STOPS[theme];
    this.zero = ZERO[theme];
    const stops = this.stops.map(channels);
    this.table = new Uint32Array(STEPS + 1);
    for (let place = 0; place <= STEPS; place += 1) {
      const position = (place / STEPS) * (stops.length - 1);
      const below = Math.min(Math.floor(position), stops.length - 2);
      const share = position - below;
      this.table[place] = packed(
        stops[below].map((one, k) => Math.round(one + share * (stops[below + 1][k] - one))),
      );
    }
    this.zeroPixel = packed(channels(this.zero));
    this.bad = BAD[theme];
    this.badPixel = packed(channels(this.bad));
  }

  /** Returns the color of a value as a Uint32 pixel of an ImageData; transparent for NaN. */
  pixel(value) {
    if (value !== value) return 0;
    if (value === -Infinity) return this.zeroPixel;
    const place = Math.round((value / this.limit + 1) * (STEPS / 2));
    return this.table[place < 0 ? 0 : place > STEPS ? STEPS : place];
  }

  /** Returns the whole range as a CSS gradient. */
  gradient() {
    return `linear-gradient(to right, ${this.stops.join(', ')})`;
  }
}

function channels(color) {
  return [1, 3, 5].map((start) => parseInt(color.slice(start, start + 2), 16));
}

// Canvas pixels are little-endian RGBA on every machine that runs a browser.
function packed([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
